// Conversations, stored in this browser alone (IndexedDB): { id, title, changed, messages }, a message being { role, content } and, if any,
// reasoning, images and audio (`pictures` and `sounds`: data URLs), captions (of video frames), cost and problem.

const NAME = "effllm", STORE = "conversations";
const FORMAT = "effllm-session", VERSION = 1; // what /save FILE.json of `effllm chat` writes, and /load reads

export const TITLE_LENGTH = 60;

export class Conversations {
  #database;

  static async open() {
    const created = new Conversations();
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    created.#database = await resultOf(request);
    return created;
  }

  // Latest first.
  async all() {
    const stored = await resultOf(this.#store("readonly").getAll());
    return stored.sort((one, other) => other.changed - one.changed);
  }

  async save(conversation) {
    conversation.changed = Date.now();
    await resultOf(this.#store("readwrite").put(conversation));
  }

  async remove(id) {
    await resultOf(this.#store("readwrite").delete(id));
  }

  #store(mode) {
    return this.#database.transaction(STORE, mode).objectStore(STORE);
  }
}

export function newConversation() {
  return { id: newId(), title: "", changed: Date.now(), messages: [] };
}

// crypto.randomUUID exists only in secure contexts, which a page from another machine over plain HTTP is not.
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (each) => each.toString(16).padStart(2, "0")).join("");
}

export function titleOf(messages) {
  const first = messages.find((each) => each.role === "user")?.content.trim().split("\n")[0] ?? "";
  return first.length > TITLE_LENGTH ? `${first.slice(0, TITLE_LENGTH - 1)}…` : first || "Chat";
}

export function toFile(conversation, system) {
  const messages = conversation.messages.filter((each) => each.content).map(({ role, content }) => ({ role, content }));
  return JSON.stringify({ format: FORMAT, version: VERSION, system: system || null, messages, settings: {} }, null, 2) + "\n";
}

// Throws an Error with a one-line message for the user.
export function fromFile(text, name) {
  let saved = null;
  try {
    saved = JSON.parse(text);
  } catch {
    // no JSON: reported below
  }
  const isMessage = (each) => typeof each?.role === "string" && typeof each.content === "string";
  if (saved?.format !== FORMAT || saved.version !== VERSION || !Array.isArray(saved.messages) || !saved.messages.every(isMessage)) {
    throw new Error(`${name} is not a saved conversation: load a file written by Save here, or by /save in effllm chat`);
  }
  const messages = saved.messages.filter((each) => each.role !== "system").map(({ role, content }) => ({ role, content }));
  return { ...newConversation(), title: titleOf(messages), messages };
}

function resultOf(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
