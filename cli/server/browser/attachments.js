// Files sent with a message: images and videos where the model takes images, audio where it takes audio, and text as part of the message.

import { fitting } from "./audio.js";
import { element } from "./thread.js";
import { isVideo, moments } from "./videos.js";

const LARGEST_TEXT = 1 << 20, LARGEST_PICTURE = 20 << 20, LARGEST_SOUND = 256 << 20, LARGEST_VIDEO = 2 ** 31; // bytes

export class Attachments {
  #list;

  constructor(list) {
    this.#list = list;
    this.sees = this.hears = false;
    this.tell = () => {}; // progress of a file that takes a while
    this.files = [];
  }

  // Throws an Error with a one-line message for the user.
  async add(files) {
    for (const file of files) {
      this.files.push({ name: file.name, ...await this.#read(file) });
      this.#show();
    }
  }

  async #read(file) {
    const isPicture = file.type.startsWith("image/"), isSound = file.type.startsWith("audio/"), moves = isVideo(file);
    if ((isPicture || moves) && !this.sees) throw new Error(`${file.name}: this model does not support images`);
    if (isSound && !this.hears) throw new Error(`${file.name}: this model does not support audio`);
    const most = isPicture ? LARGEST_PICTURE : isSound ? LARGEST_SOUND : moves ? LARGEST_VIDEO : LARGEST_TEXT;
    if (file.size > most) throw new Error(`${file.name} is too large`);
    if (isPicture) return { pictures: [{ picture: await dataUrl(file) }] };
    if (moves) return { pictures: await moments(file, (done, all) => this.tell(`${file.name}: frame ${done} of ${all}`)) };
    return isSound ? { sound: await dataUrl(await fitting(file)) } : { text: await textOf(file) };
  }

  // The message with this text and the attached files, which are cleared.
  taken(text) {
    const texts = this.files.filter((each) => each.text !== undefined).map((each) => quoted(each.name, each.text));
    const shown = this.files.flatMap((each) => each.pictures ?? []);
    const pictures = shown.map((each) => each.picture), captions = shown.map((each) => each.caption ?? "");
    const sounds = this.files.filter((each) => each.sound).map((each) => each.sound);
    this.files = [];
    this.#show();
    const seen = pictures.length ? { pictures, ...(captions.some(Boolean) ? { captions } : {}) } : {}, heard = sounds.length ? { sounds } : {};
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
    throw new Error(`${file.name} is not a text, image, video or audio file`);
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
