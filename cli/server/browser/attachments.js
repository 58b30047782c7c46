// Files that go with a message: pictures where the model sees, sounds where it hears, and texts as a part of the message.

import { fitting } from "./sounds.js";
import { element } from "./thread.js";

const LARGEST_TEXT = 1 << 20, LARGEST_PICTURE = 20 << 20, LARGEST_SOUND = 256 << 20; // bytes

export class Attachments {
  #list;

  constructor(list) {
    this.#list = list;
    this.sees = this.hears = false;
    this.files = [];
  }

  // Throws an Error with a line for a person.
  async add(files) {
    for (const file of files) {
      this.files.push({ name: file.name, ...await this.#read(file) });
      this.#show();
    }
  }

  async #read(file) {
    const isPicture = file.type.startsWith("image/"), isSound = file.type.startsWith("audio/");
    if (isPicture && !this.sees) throw new Error(`${file.name}: this model sees no pictures`);
    if (isSound && !this.hears) throw new Error(`${file.name}: this model hears no sounds`);
    if (file.size > (isPicture ? LARGEST_PICTURE : isSound ? LARGEST_SOUND : LARGEST_TEXT)) throw new Error(`${file.name} is too large`);
    if (isPicture) return { picture: await dataUrl(file) };
    return isSound ? { sound: await dataUrl(await fitting(file)) } : { text: await textOf(file) };
  }

  // What a message with this text is, and none of them are left.
  taken(text) {
    const texts = this.files.filter((each) => each.text !== undefined).map((each) => quoted(each.name, each.text));
    const of = (kind) => this.files.filter((each) => each[kind]).map((each) => each[kind]);
    const pictures = of("picture"), sounds = of("sound");
    this.files = [];
    this.#show();
    const seen = pictures.length ? { pictures } : {}, heard = sounds.length ? { sounds } : {};
    return { role: "user", content: [...texts, text].join("\n\n").trim(), ...seen, ...heard };
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
    throw new Error(`${file.name} is no text, no picture and no sound`);
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
