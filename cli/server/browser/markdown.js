// Renders models' Markdown as elements. Text becomes text nodes and nothing else, so no answer can put markup of its own into the page;
// links lead where http, https and mailto lead. While an answer grows only its last blocks are rendered again.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const BLANK = /^\s*$/;
const DEEPEST = 20; // quotes in lists in quotes

const shown = new WeakMap(); // element -> the source of each of its blocks

// Shows a text in an element; blocks that have not changed since the last time stay as they are.
export function show(element, text) {
  const found = blocks(text.split("\n"));
  const before = shown.get(element) ?? [];
  let same = 0;
  while (same < before.length && same < found.length && before[same] === found[same].source) same += 1;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const each of found.slice(same)) element.append(made(each, 0));
  shown.set(element, found.map((each) => each.source));
}

// Lines to blocks { kind, source, ... }.
export function blocks(lines) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (BLANK.test(lines[at])) {
      at += 1;
      continue;
    }
    const block = fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? quote(lines, at) ?? list(lines, at) ?? table(lines, at)
      ?? paragraph(lines, at);
    found.push({ ...block, source: `${block.kind}\n${lines.slice(at, block.end).join("\n")}` });
    at = block.end;
  }
  return found;
}

function fence(lines, at) {
  const opening = FENCE.exec(lines[at]);
  if (!opening) return null;
  const closing = new RegExp(`^ {0,3}${opening[1][0]}{${opening[1].length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  return { kind: "code", language: opening[2], text: lines.slice(at + 1, end).join("\n"), end: Math.min(end + 1, lines.length) };
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  return found && { kind: "heading", level: found[1].length, text: found[2], end: at + 1 };
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? { kind: "rule", end: at + 1 } : null;
}

function quote(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return end > at ? { kind: "quote", lines: lines.slice(at, end).map((each) => each.replace(QUOTE, "")), end } : null;
}

// Items of one list: what is indented below an item belongs to it.
function list(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const indent = first[1].length, ordered = /\d/.test(first[2]), items = [];
  let end = at, inside = 0;
  while (end < lines.length) {
    const line = lines[end], item = ITEM.exec(line), width = line.search(/\S/);
    if (item && item[1].length <= indent + 1 && !RULE.test(line)) {
      if (items.length && /\d/.test(item[2]) !== ordered) break;
      inside = item[0].length;
      items.push([line.slice(inside)]);
    } else if (width < 0) {
      const next = lines.slice(end).findIndex((each) => !BLANK.test(each));
      const follows = next < 0 ? "" : lines[end + next];
      if (!follows || !(follows.search(/\S/) > indent || ITEM.test(follows))) break;
      items.at(-1).push("");
    } else if (width > indent || !starts(lines, end) && !BLANK.test(lines[end - 1])) {
      items.at(-1).push(line.slice(Math.min(width, inside)));
    } else {
      break;
    }
    end += 1;
  }
  return { kind: "list", ordered, start: parseInt(first[2], 10), items, end };
}

function table(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-") || !TABLE_RULE.test(lines[at + 1])) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  return { kind: "table", head: cells(lines[at]), rows: lines.slice(at + 2, end).map(cells), end };
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((each) => each.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && !BLANK.test(lines[end]) && !starts(lines, end)) end += 1;
  return { kind: "paragraph", text: lines.slice(at, end).map((each) => each.trim()).join("\n"), end };
}

// Whether a block that ends a paragraph begins with a line.
function starts(lines, at) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((each) => each.test(lines[at])) || table(lines, at) !== null;
}

function made(block, depth) {
  const inner = (lines) => (depth < DEEPEST ? blocks(lines).map((each) => made(each, depth + 1)) : [lines.join("\n")]);
  switch (block.kind) {
    case "code": return code(block);
    case "heading": return node(`h${block.level}`, inline(block.text));
    case "rule": return node("hr");
    case "quote": return node("blockquote", inner(block.lines));
    case "list": {
      const tight = block.items.every((lines) => !lines.some((each) => BLANK.test(each)));
      const items = block.items.map((lines) => node("li", tight ? loosened(inner(lines)) : inner(lines)));
      const whole = node(block.ordered ? "ol" : "ul", items);
      if (block.ordered && block.start !== 1) whole.start = block.start;
      return whole;
    }
    case "table": {
      const row = (texts, kind) => node("tr", texts.map((each) => node(kind, inline(each))));
      const body = block.rows.map((each) => row(block.head.map((_, column) => each[column] ?? ""), "td"));
      const wide = node("div", [node("table", [node("thead", [row(block.head, "th")]), node("tbody", body)])]);
      wide.className = "wide";
      return wide;
    }
    default: return node("p", inline(block.text));
  }
}

// An item of a tight list has its text, not a paragraph of it.
function loosened(nodes) {
  return nodes.flatMap((each) => (each.nodeName === "P" ? [...each.childNodes] : [each]));
}

function code(block) {
  const copy = node("button", ["Copy"]);
  copy.type = "button";
  copy.dataset.copies = block.text;
  const bar = node("div", [node("span", [block.language || "text"]), copy]);
  bar.className = "bar";
  const whole = node("div", [bar, node("pre", [node("code", [block.text])])]);
  whole.className = "code";
  return whole;
}

const MARKS = [
  [/\\([!-/:-@[-`{-~])/, (found) => found[1]],
  [/(`+)(?!`)([\s\S]*?[^`])\1(?!`)/, (found) => node("code", [found[2].replace(/^ (.*\S.*) $/s, "$1")])],
  [/!?\[([^[\]]*(?:\[[^[\]]*\][^[\]]*)*)\]\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/,
    (found, depth) => link(found[2], inline(found[1], depth)) ?? found[0]],
  [/<(https?:\/\/[^\s<>]+)>/, (found) => link(found[1], [found[1]]) ?? found[0]],
  [/https?:\/\/[^\s<>"'`]*[^\s<>"'`.,:;!?)\]}*_]/, (found) => link(found[0], [found[0]]) ?? found[0]],
  [/\*\*(?=\S)([\s\S]*?[^\s*]\**)\*\*(?!\*)/, (found, depth) => node("strong", inline(found[1], depth))],
  [/(?<![\p{L}\p{N}_])__(?=\S)([\s\S]*?\S)__(?![\p{L}\p{N}_])/u, (found, depth) => node("strong", inline(found[1], depth))],
  [/\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)/, (found, depth) => node("em", inline(found[1], depth))],
  [/(?<![\p{L}\p{N}_])_(?=[^\s_])([\s\S]*?[^\s_])_(?![\p{L}\p{N}_])/u, (found, depth) => node("em", inline(found[1], depth))],
  [/~~(?=\S)([\s\S]*?\S)~~/, (found, depth) => node("del", inline(found[1], depth))],
];

// Inline Markdown to nodes: of all marks the one that begins first is rendered first.
export function inline(text, depth = 0) {
  const nodes = [], next = MARKS.map(() => undefined);
  let at = 0;
  while (depth < DEEPEST) {
    let first = null, which = -1;
    MARKS.forEach(([pattern], number) => {
      if (next[number] === undefined || next[number] && next[number].index < at) next[number] = after(pattern, text, at);
      if (next[number] && (first === null || next[number].index < first.index)) [first, which] = [next[number], number];
    });
    if (first === null) break;
    if (first.index > at) nodes.push(text.slice(at, first.index));
    nodes.push(MARKS[which][1](first, depth + 1));
    at = first.index + first[0].length;
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

function after(pattern, text, at) {
  const from = new RegExp(pattern.source, `${pattern.flags}g`);
  from.lastIndex = at;
  return from.exec(text);
}

function link(address, children) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return null;
  const made = node("a", children);
  made.href = address;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

function node(kind, children = []) {
  const made = document.createElement(kind);
  made.append(...children);
  return made;
}
