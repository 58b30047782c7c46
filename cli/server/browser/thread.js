// Shows the messages of a conversation. `actions` has the callbacks of a message's buttons: { edit, regenerate, remove }.

import { show } from "./markdown.js";

const FOLLOW_WITHIN = 80; // pixels from the end, within which the view scrolls with a growing answer

export class Thread {
  #element;
  #actions;

  constructor(element, actions) {
    this.#element = element;
    this.#actions = actions;
    element.addEventListener("click", (event) => {
      const button = event.target.closest("[data-copies]");
      if (button) copyText(button, button.dataset.copies);
    });
  }

  // All of a conversation, or a greeting where there is nothing yet.
  show(messages, greeting) {
    this.#element.replaceChildren();
    if (!messages.length) this.#element.append(element("p", { className: "greeting" }, greeting));
    messages.forEach((message, index) => this.#add(message, index));
    this.#scrollToEnd();
  }

  add(message, index) {
    if (index === 0) this.#element.replaceChildren();
    this.#add(message, index);
    this.#scrollToEnd();
  }

  // A message that has grown, or is complete.
  update(message, index) {
    const isAtEnd = this.#element.scrollHeight - this.#element.scrollTop - this.#element.clientHeight < FOLLOW_WITHIN;
    render(this.#element.children[index], message);
    if (isAtEnd) this.#scrollToEnd();
  }

  // Edits a message in a text field, until it is sent or cancelled.
  edit(message, index, send) {
    const body = this.#element.children[index].querySelector(".body");
    const field = element("textarea", { value: message.content, ariaLabel: "The message, changed" });
    const cancel = () => this.#element.children[index].replaceWith(this.#create(message, index));
    const sendButton = element("button", { type: "button", onclick: () => send(field.value) }, "Send");
    const cancelButton = element("button", { type: "button", onclick: cancel }, "Cancel");
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(field.value);
    });
    body.replaceChildren(field, element("div", { className: "row" }, sendButton, cancelButton));
    field.focus();
  }

  #add(message, index) {
    this.#element.append(this.#create(message, index));
  }

  #create(message, index) {
    const isUser = message.role === "user";
    const act = (name, title, run) => element("button", { type: "button", title, onclick: run }, name);
    const actions = element("div", { className: "acts" }, element("span", { className: "cost" }),
      element("button", { type: "button", onclick: (event) => copyText(event.target, message.content) }, "Copy"),
      isUser ? act("Edit", "Edit and continue from here", () => this.#actions.edit(index))
        : act("Again", "Regenerate this answer", () => this.#actions.regenerate(index)),
      act("Delete", "Delete this and all later messages", () => this.#actions.remove(index)));
    const created = element("article", { className: `message ${isUser ? "user" : "assistant"}` }, element("div", { className: "body" }), actions);
    created.setAttribute("aria-label", isUser ? "You" : "The model");
    render(created, message);
    return created;
  }

  #scrollToEnd() {
    this.#element.scrollTop = this.#element.scrollHeight;
  }
}

function render(article, message) {
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
    const details = childOf(body, "details", "reasoning", () => [element("summary", {}), element("div", { className: "prose" })]);
    details.querySelector("summary").textContent = message.content ? "Reasoning" : "Reasoning…";
    show(details.querySelector(".prose"), message.reasoning);
  }
  if (message.content) show(childOf(body, "div", "answer prose"), message.content);
  if (message.problem) childOf(body, "p", "problem").textContent = message.problem;
}

// The only child of a class, created on first use.
function childOf(body, kind, className, children = () => []) {
  const existing = [...body.children].find((each) => each.className === className);
  if (existing) return existing;
  const created = element(kind, { className }, ...children());
  body.append(created);
  return created;
}

export function element(kind, properties, ...children) {
  const created = Object.assign(document.createElement(kind), properties);
  created.append(...children);
  return created;
}

// The clipboard API exists only in secure contexts; elsewhere a selection is copied.
async function copyText(button, text) {
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
