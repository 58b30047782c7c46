// A chat with the models of the server that this page comes from.

import { Api } from "./api.js";
import { Attachments } from "./attachments.js";
import { Conversations, newConversation, fromFile, titleOf, toFile } from "./conversations.js";
import { fit } from "./images.js";
import { Settings } from "./settings.js";
import { Thread, element } from "./thread.js";

const UNAUTHORIZED = 401;
const CUT_OFF = "The answer was cut off: the token limit was reached, or the context is full.";
const byId = (id) => document.getElementById(id);
const api = new Api();
const settings = new Settings(byId("settings"), () => {
  api.key = settings.key;
  refresh();
});
const attachments = new Attachments(byId("attached"));
attachments.onProgress = showStatus;
const thread = new Thread(byId("thread"), { edit, regenerate, remove });
let conversations = null; // null: this browser cannot store any
let current = newConversation();
let abortController = null; // aborts the answer being generated
let describedModel = null; // the model whose capabilities these are
let capabilities = [];

// ---- models

async function refresh() {
  try {
    const models = (await api.models()).filter((each) => each.writes !== false); // the others are embedders or rerankers
    const chosen = models.some((each) => each.id === settings.model) ? settings.model : models[0]?.id;
    byId("model").replaceChildren(...models.map((each) => {
      const loaded = each.status && each.status.value !== "unloaded" ? ` (${each.status.value})` : "";
      return element("option", { value: each.id, selected: each.id === chosen }, each.id + loaded);
    }));
    if (!models.length) return showStatus("no text model is on this machine yet: effllm pull MODEL", true);
    if (chosen !== describedModel) await selectModel(chosen);
    if (byId("state").classList.contains("wrong")) showStatus("");
  } catch (error) {
    showError(error);
  }
}

async function selectModel(model) {
  settings.model = describedModel = model;
  capabilities = await api.capabilities(model).catch(() => []);
  attachments.takesImages = capabilities.includes("vision");
  attachments.takesAudio = capabilities.includes("audio");
}

// ---- conversations

async function showConversations() {
  const all = conversations ? await conversations.all() : [];
  byId("conversations").replaceChildren(...all.map((each) => {
    const button = (name, className, title, run) => element("button", { type: "button", className, title, onclick: run }, name);
    return element("li", { className: each.id === current.id ? "current" : "" },
      button(each.title, "open", each.title, () => open(each)),
      button("↓", "act", "Save it as a file, which effllm chat can load", () => download(each)),
      button("×", "act", "Delete it", () => forget(each)));
  }));
}

function open(conversation) {
  stop();
  current = conversation;
  document.body.classList.remove("side");
  byId("menu").ariaExpanded = "false";
  thread.show(current.messages, "Conversations stay in this browser and on the server's machine.");
  showConversations();
  byId("text").focus();
}

async function saveCurrent() {
  if (!conversations) return;
  current.title ||= titleOf(current.messages);
  try {
    await conversations.save(current);
  } catch (error) {
    showStatus(`this browser cannot save the conversation: ${error.message}`, true);
  }
  await showConversations();
}

async function forget(conversation) {
  if (!confirm(`Delete “${conversation.title}”?`)) return;
  await conversations.remove(conversation.id);
  if (conversation.id === current.id) open(newConversation());
  else await showConversations();
}

function download(conversation) {
  const address = URL.createObjectURL(new Blob([toFile(conversation, settings.values.system)], { type: "application/json" }));
  element("a", { href: address, download: `${conversation.title.replace(/[^\p{L}\p{N} -]/gu, "").trim() || "chat"}.json` }).click();
  URL.revokeObjectURL(address);
}

// ---- messages

async function send(message) {
  current.messages.push(message);
  thread.add(message, current.messages.length - 1);
  await answer();
}

async function edit(index) {
  if (abortController) return;
  thread.edit(current.messages[index], index, async (text) => {
    if (!text.trim() || abortController) return;
    const changed = { ...current.messages[index], content: text };
    current.messages.length = index;
    thread.show(current.messages, "");
    await send(changed);
  });
}

async function regenerate(index) {
  if (abortController) return;
  current.messages.length = index;
  thread.show(current.messages, "");
  await answer();
}

async function remove(index) {
  if (abortController) return;
  current.messages.length = index;
  thread.show(current.messages, "");
  if (current.messages.length || !conversations) return saveCurrent();
  await conversations.remove(current.id);
  open(newConversation());
}

// Generates the answer to the conversation's last message.
async function answer() {
  const conversation = current, message = { role: "assistant", content: "" }, index = conversation.messages.length;
  const payload = { model: byId("model").value, messages: systemMessages(), ...settings.fields(capabilities.includes("thinking")) };
  const history = [...conversation.messages];
  conversation.messages.push(message);
  thread.add(message, index);
  const controller = abortController = new AbortController();
  setBusy(true);
  let frameRequest = 0;
  const draw = () => {
    frameRequest = 0;
    if (conversation === current) thread.update(message, index);
  };
  try {
    showStatus("reading");
    if (await fit(history)) showStatus("reading (images scaled down to fit a request)");
    payload.messages.push(...mergeTurns(history));
    for await (const { notice, chunk } of api.chat(payload, controller.signal)) {
      if (notice) showStatus(notice);
      const choice = chunk?.choices?.[0];
      if (!choice) continue;
      message.reasoning = (message.reasoning ?? "") + (choice.delta.reasoning_content ?? "") || undefined;
      message.content += choice.delta.content ?? "";
      if (choice.delta.content || choice.delta.reasoning_content) showStatus("writing");
      if (chunk.timings) message.cost = costOf(chunk.timings);
      if (choice.finish_reason === "length") message.problem = CUT_OFF;
      frameRequest ||= requestAnimationFrame(draw);
    }
    showStatus("");
  } catch (error) {
    if (error.name === "AbortError") showStatus("stopped");
    else {
      message.problem = error.message;
      showError(error);
    }
  } finally {
    cancelAnimationFrame(frameRequest);
    draw();
    if (abortController === controller) {
      abortController = null;
      setBusy(false);
    }
  }
  if (!message.content && !message.reasoning && !message.problem) conversation.messages.splice(index, 1); // stopped before it began
  if (conversation === current) {
    if (conversation.messages.length === index) thread.show(conversation.messages, "");
    await saveCurrent();
  } else if (conversations) await conversations.save(conversation).then(showConversations);
  await refresh(); // which models are loaded
}

function systemMessages() {
  return settings.values.system ? [{ role: "system", content: settings.values.system }] : [];
}

// The messages of a request. Consecutive user messages are merged: templates require alternating turns.
function mergeTurns(messages) {
  const turns = [];
  for (const { role, content, pictures = [], captions = [], sounds = [] } of messages) {
    const parts = [...imageParts(pictures, captions), ...sounds.map(audioPart)];
    if (!content && !parts.length) continue;
    const last = turns.at(-1);
    if (last?.role !== role) turns.push({ role, content, parts });
    else turns[turns.length - 1] = { role, content: `${last.content}\n\n${content}`, parts: [...last.parts, ...parts] };
  }
  return turns.map(({ role, content, parts }) => ({ role, content: parts.length ? [...parts, textPart(content)] : content }));
}

// Frames of a video each after its timestamp, on lines of their own, as the server has them for a video that it is sent.
function imageParts(urls, captions) {
  return urls.flatMap((url, place) => {
    const picture = { type: "image_url", image_url: { url } }, caption = captions[place];
    return caption ? [textPart(`${captions[place - 1] ? "\n" : ""}${caption}\n`), picture] : [picture];
  });
}

// OpenAI names two formats; the server detects the format from the bytes.
function audioPart(url) {
  const [head, data] = url.split(",");
  return { type: "input_audio", input_audio: { data, format: /mpeg|mp3/.test(head) ? "mp3" : "wav" } };
}

function textPart(text) {
  return { type: "text", text };
}

function costOf(timings) {
  const rate = timings.predicted_per_second;
  return `${timings.predicted_n} tokens${rate ? `, ${rate.toFixed(rate < 20 ? 1 : 0)} a second` : ""}`;
}

function stop() {
  abortController?.abort();
}

// ---- status line

function setBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
}

function showStatus(text, wrong = false) {
  byId("state").textContent = byId("state").title = text;
  byId("state").classList.toggle("wrong", wrong);
}

function showError(error) {
  showStatus(error.message, true);
  if (error.status === UNAUTHORIZED && !byId("settings").open) settings.askForKey();
}

// ---- user actions

async function attach(files) {
  try {
    await attachments.add(files);
    showStatus("");
  } catch (error) {
    showStatus(error.message, true);
  }
}

function resizeInput() {
  const field = byId("text");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

byId("composer").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (abortController || !text && !attachments.files.length) return;
  byId("text").value = "";
  resizeInput();
  await send(attachments.takeMessage(text));
});
byId("text").addEventListener("input", resizeInput);
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
byId("text").addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) attach(event.clipboardData.files);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("settings").open) stop();
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    byId("composer").classList.toggle("over", kind === "dragover");
    if (kind === "drop") attach(event.dataTransfer.files);
  });
}
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", () => open(newConversation()));
byId("open-settings").addEventListener("click", () => settings.open());
byId("model").addEventListener("change", (event) => selectModel(event.target.value));
byId("attach").addEventListener("click", () => byId("attach-file").click());
byId("attach-file").addEventListener("change", async (event) => {
  await attach(event.target.files);
  event.target.value = "";
});
byId("load").addEventListener("click", () => byId("load-file").click());
byId("load-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  try {
    open(fromFile(await file.text(), file.name));
    await saveCurrent();
  } catch (error) {
    showStatus(error.message, true);
  }
});
byId("menu").addEventListener("click", () => {
  byId("menu").ariaExpanded = String(document.body.classList.toggle("side"));
});
try {
  conversations = await Conversations.open();
} catch {
  showStatus("this browser cannot save conversations: they are lost when the page is closed", true);
}
api.key = settings.key;
open(current);
await refresh();
