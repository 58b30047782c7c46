// Generation options, stored in this browser. The server's API key is kept for as long as the tab lives.

const NAME = "effllm.settings", KEY = "effllm.key";
const NUMBERS = ["temperature", "top_p", "max_tokens"];

export class Settings {
  constructor(dialog, changed) {
    this.dialog = dialog;
    this.form = dialog.querySelector("form");
    try {
      this.values = JSON.parse(localStorage.getItem(NAME) ?? "{}");
    } catch {
      this.values = {}; // of another version
    }
    dialog.addEventListener("close", () => {
      this.#take();
      changed();
    });
  }

  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  get model() {
    return this.values.model ?? "";
  }

  set model(name) {
    this.#keep({ ...this.values, model: name });
  }

  // A request was refused for its API key, or was sent without one.
  askForKey() {
    this.open("key");
    const asks = this.form.querySelector("#asks");
    asks.textContent = this.key ? "Wrong API key." : "This server needs an API key (--api-key).";
    asks.hidden = false;
  }

  open(focus) {
    this.form.querySelector("#asks").hidden = true;
    for (const field of this.form.querySelectorAll("[name]")) field.value = field.name === "key" ? this.key : this.values[field.name] ?? "";
    this.dialog.showModal();
    if (focus) this.form.elements[focus].focus();
  }

  // The request fields of these options; `thinks`: whether the model reasons.
  fields(thinks) {
    const said = {};
    for (const name of NUMBERS) if (this.values[name] !== undefined) said[name] = Number(this.values[name]);
    if (thinks && this.values.thinking) said.chat_template_kwargs = { enable_thinking: this.values.thinking === "on" };
    return said;
  }

  #take() {
    const values = { model: this.model };
    for (const [name, value] of new FormData(this.form)) if (name !== "key" && String(value).trim()) values[name] = value;
    sessionStorage.setItem(KEY, this.form.elements.key.value.trim());
    this.#keep(values);
  }

  #keep(values) {
    this.values = values;
    localStorage.setItem(NAME, JSON.stringify(values));
  }
}
