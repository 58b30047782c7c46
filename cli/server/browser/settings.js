// Generation options, stored in this browser. The server's API key is kept for as long as the tab lives.

const STORAGE_KEY = "effllm.settings", API_KEY_STORAGE = "effllm.key";
const NUMBERS = ["temperature", "top_p", "max_tokens"];

export class Settings {
  constructor(dialog, changed) {
    this.dialog = dialog;
    this.form = dialog.querySelector("form");
    try {
      this.values = JSON.parse(localStorage.getItem(STORAGE_KEY) ?? "{}");
    } catch {
      this.values = {}; // of another version
    }
    dialog.addEventListener("close", () => {
      this.#readForm();
      changed();
    });
  }

  get key() {
    return sessionStorage.getItem(API_KEY_STORAGE) ?? "";
  }

  get model() {
    return this.values.model ?? "";
  }

  set model(name) {
    this.#store({ ...this.values, model: name });
  }

  // A request was refused for its API key, or was sent without one.
  askForKey() {
    this.open("key");
    const notice = this.form.querySelector("#asks");
    notice.textContent = this.key ? "Wrong API key." : "This server needs an API key (--api-key).";
    notice.hidden = false;
  }

  open(focus) {
    this.form.querySelector("#asks").hidden = true;
    for (const field of this.form.querySelectorAll("[name]")) field.value = field.name === "key" ? this.key : this.values[field.name] ?? "";
    this.dialog.showModal();
    if (focus) this.form.elements[focus].focus();
  }

  // The request fields of these options; `reasons`: whether the model supports reasoning.
  fields(reasons) {
    const requestFields = {};
    for (const name of NUMBERS) if (this.values[name] !== undefined) requestFields[name] = Number(this.values[name]);
    if (reasons && this.values.thinking) requestFields.chat_template_kwargs = { enable_thinking: this.values.thinking === "on" };
    return requestFields;
  }

  #readForm() {
    const values = { model: this.model };
    for (const [name, value] of new FormData(this.form)) if (name !== "key" && String(value).trim()) values[name] = value;
    sessionStorage.setItem(API_KEY_STORAGE, this.form.elements.key.value.trim());
    this.#store(values);
  }

  #store(values) {
    this.values = values;
    localStorage.setItem(STORAGE_KEY, JSON.stringify(values));
  }
}
