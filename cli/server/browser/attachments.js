// Files that go with a message: pictures as they are, where the model sees, and texts as a part of the message.

import { element } from "./thread.js";

const LARGEST_TEXT = 1 << 20, LARGEST_PICTURE = 20 << 20; // bytes

export class Attachments {
  #list;

  constructor(list) {
    this.#list = list;
    this.sees = false;
    this.files = [];
  }

  // Throws an Error with a line for a person.
  async add(files) {
    for (const file of files) {
      const isPicture = file.type.startsWith("image/");
      if (isPicture && !this.sees) throw new Error(`${file.name}: this model sees no pictures`);
      if (file.size > (isPicture ? LARGEST_PICTURE : LARGEST_TEXT)) throw new Error(`${file.name} is too large`);
      this.files.push({ name: file.name, ...(isPicture ? { picture: await dataUrl(file) } : { text: await textOf(file) }) });
      this.#show();
    }
  }

  // What a message with this text is, and none of them are left.
  taken(text) {
    const texts = this.files.filter((each) => each.text !== undefined).map((each) => quoted(each.name, each.text));
    const pictures = this.files.filter((each) => each.picture).map((each) => each.picture);
    this.files = [];
    this.#show();
    return { role: "user", content: [...texts, text].join("\n\n").trim(), ...(pictures.length ? { pictures } : {}) };
  }

  #show() {
    this.#list.replaceChildren(...this.files.map((each) => element("li", {}, each.name, element("button", {
      type: "button", ariaLabel: `Without ${each.name}`, onclick: () => {
        this.files = this.files.filter((other) => other !== each);
        this.#show();
      },
    }, "×"))));
  }
}

function quoted(name, text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((each) => each.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

async function textOf(file) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is neither a text nor a picture`);
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}
