// The messages of a conversation as the user sees them. `acts` has the callbacks of a message's buttons: { edit, again, remove }.

import { show } from "./markdown.js";

const NEAR = 80; // pixels from the end, within which the view scrolls with a growing answer

export class Thread {
  #element;
  #acts;

  constructor(element, acts) {
    this.#element = element;
    this.#acts = acts;
    element.addEventListener("click", (event) => {
      const button = event.target.closest("[data-copies]");
      if (button) copied(button, button.dataset.copies);
    });
  }

  // All of a conversation, or a greeting where there is nothing yet.
  show(messages, greeting) {
    this.#element.replaceChildren();
    if (!messages.length) this.#element.append(element("p", { className: "greeting" }, greeting));
    messages.forEach((message, index) => this.#add(message, index));
    this.#toEnd();
  }

  add(message, index) {
    if (index === 0) this.#element.replaceChildren();
    this.#add(message, index);
    this.#toEnd();
  }

  // A message that has grown, or is complete.
  update(message, index) {
    const follows = this.#element.scrollHeight - this.#element.scrollTop - this.#element.clientHeight < NEAR;
    fill(this.#element.children[index], message);
    if (follows) this.#toEnd();
  }

  // Edits a message in a text field, until it is sent or cancelled.
  edit(message, index, send) {
    const body = this.#element.children[index].querySelector(".body");
    const field = element("textarea", { value: message.content, ariaLabel: "The message, changed" });
    const leave = () => this.#element.children[index].replaceWith(this.#made(message, index));
    const sent = element("button", { type: "button", onclick: () => send(field.value) }, "Send");
    const left = element("button", { type: "button", onclick: leave }, "Cancel");
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(field.value);
    });
    body.replaceChildren(field, element("div", { className: "row" }, sent, left));
    field.focus();
  }

  #add(message, index) {
    this.#element.append(this.#made(message, index));
  }

  #made(message, index) {
    const own = message.role === "user";
    const act = (name, title, run) => element("button", { type: "button", title, onclick: run }, name);
    const acts = element("div", { className: "acts" }, element("span", { className: "cost" }),
      element("button", { type: "button", onclick: (event) => copied(event.target, message.content) }, "Copy"),
      own ? act("Edit", "Edit and continue from here", () => this.#acts.edit(index))
        : act("Again", "Regenerate this answer", () => this.#acts.again(index)),
      act("Delete", "Delete this and all later messages", () => this.#acts.remove(index)));
    const made = element("article", { className: `message ${own ? "user" : "assistant"}` }, element("div", { className: "body" }), acts);
    made.setAttribute("aria-label", own ? "You" : "The model");
    fill(made, message);
    return made;
  }

  #toEnd() {
    this.#element.scrollTop = this.#element.scrollHeight;
  }
}

function fill(article, message) {
  const body = article.querySelector(".body");
  article.querySelector(".cost").textContent = message.cost ?? "";
  if (message.role === "user") {
    const pictures = (message.pictures ?? []).map((each, place) => {
      const title = message.captions?.[place]?.replace(/[<>]/g, "") ?? "";
      return element("img", { src: each, alt: "An image in this message", title, className: title ? "moment" : "" });
    });
    const player = { controls: true, ariaLabel: "Audio in this message" };
    const sounds = (message.sounds ?? []).map((each) => element("audio", { ...player, src: each }));
    const shown = pictures.length + sounds.length ? [element("div", { className: "pictures" }, ...pictures, ...sounds)] : [];
    body.replaceChildren(...shown, element("div", { className: "plain" }, message.content));
    return;
  }
  if (message.reasoning) {
    const details = part(body, "details", "reasoning", () => [element("summary", {}), element("div", { className: "prose" })]);
    details.querySelector("summary").textContent = message.content ? "Reasoning" : "Reasoning…";
    show(details.querySelector(".prose"), message.reasoning);
  }
  if (message.content) show(part(body, "div", "answer prose"), message.content);
  if (message.problem) part(body, "p", "problem").textContent = message.problem;
}

// The only child of a class, created on first use.
function part(body, kind, className, children = () => []) {
  const found = [...body.children].find((each) => each.className === className);
  if (found) return found;
  const made = element(kind, { className }, ...children());
  body.append(made);
  return made;
}

export function element(kind, properties, ...children) {
  const made = Object.assign(document.createElement(kind), properties);
  made.append(...children);
  return made;
}

// The clipboard API exists only in secure contexts; elsewhere a selection is copied.
async function copied(button, text) {
  const label = button.textContent;
  let done = true;
  if (navigator.clipboard) {
    done = await navigator.clipboard.writeText(text).then(() => true, () => false);
  } else {
    const field = element("textarea", { value: text });
    document.body.append(field);
    field.select();
    done = document.execCommand("copy");
    field.remove();
  }
  button.textContent = done ? "Copied" : "Not allowed";
  setTimeout(() => { button.textContent = label; }, 1500);
}
