// Files sent with a message: images and videos where the model takes images, audio where it takes audio, and text as part of the message.

import { fitForRequest } from "./audio.js";
import { element } from "./thread.js";
import { isVideo, sampleFrames } from "./videos.js";

const MAX_TEXT = 1 << 20, MAX_IMAGE = 20 << 20, MAX_AUDIO = 256 << 20, MAX_VIDEO = 2 ** 31; // bytes

export class Attachments {
  #list;

  constructor(list) {
    this.#list = list;
    this.takesImages = this.takesAudio = false;
    this.onProgress = () => {}; // progress of a file that takes a while
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
    const isImage = file.type.startsWith("image/"), isAudio = file.type.startsWith("audio/"), isVideoFile = isVideo(file);
    if ((isImage || isVideoFile) && !this.takesImages) throw new Error(`${file.name}: this model does not support images`);
    if (isAudio && !this.takesAudio) throw new Error(`${file.name}: this model does not support audio`);
    const limit = isImage ? MAX_IMAGE : isAudio ? MAX_AUDIO : isVideoFile ? MAX_VIDEO : MAX_TEXT;
    if (file.size > limit) throw new Error(`${file.name} is too large`);
    if (isImage) return { pictures: [{ picture: await dataUrl(file) }] };
    if (isVideoFile) return { pictures: await sampleFrames(file, (done, all) => this.onProgress(`${file.name}: frame ${done} of ${all}`)) };
    return isAudio ? { sound: await dataUrl(await fitForRequest(file)) } : { text: await readText(file) };
  }

  // The message with this text and the attached files, which are cleared.
  takeMessage(text) {
    const texts = this.files.filter((each) => each.text !== undefined).map((each) => fenced(each.name, each.text));
    const images = this.files.flatMap((each) => each.pictures ?? []);
    const pictures = images.map((each) => each.picture), captions = images.map((each) => each.caption ?? "");
    const sounds = this.files.filter((each) => each.sound).map((each) => each.sound);
    this.files = [];
    this.#show();
    const imageFields = pictures.length ? { pictures, ...(captions.some(Boolean) ? { captions } : {}) } : {}, audioFields = sounds.length ? { sounds } : {};
    return { role: "user", content: [...texts, text].join("\n\n").trim(), ...imageFields, ...audioFields };
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

function fenced(name, text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((each) => each.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

async function readText(file) {
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
