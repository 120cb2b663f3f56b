"use strict";
// The recipe's editor: line numbers with marks at problems, colours, completion by the recipe's JSON Schema.
const LINE = 20, TOP = 10, LEFT = 12; // pixels, of studio.css
const editing = find(".editing"), text = find("#text"), paint = find(".paint"), gutter = find(".gutter");
const list = find(".completion"), save = find(".save"), saved = find(".saved"), problems = find("#problems");
const path = editing.dataset.path;
let version = editing.dataset.version; // of the text that was read: a newer one is not replaced
const formFields = all(".keys-form [data-key]");
let onDisk = text.value, marked = new Set(), schema = null, offered = [], chosen = 0;

function escaped(part) {
  return part.replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);
}

function coloured(line) {
  const comment = line.search(/(^|\s)#/);
  const code = comment < 0 ? line : line.slice(0, comment), rest = comment < 0 ? "" : line.slice(comment);
  const keys = escaped(code).replace(/((?:^|[{,]|- )\s*)([\w.-]+)(?=:(\s|$))/g, '$1<span class="key">$2</span>');
  return keys + (rest && `<span class="comment">${escaped(rest)}</span>`);
}

function draw() {
  const lines = text.value.split("\n");
  paint.innerHTML = lines.map((line, at) => marked.has(at + 1) ? `<span class="wrong">${coloured(line) || " "}</span>` : coloured(line)).join("\n") + "\n";
  gutter.replaceChildren(...lines.map((_, at) => Object.assign(document.createElement("div"), {
    textContent: at + 1, className: marked.has(at + 1) ? "wrong" : "",
  })));
  editing.style.setProperty("--lines", lines.length); // the height of the sheet, within bounds
  const isSaved = text.value === onDisk;
  save.disabled = isSaved;
  if (!isSaved) saved.textContent = "not saved";
  scrolled();
}

function scrolled() {
  paint.style.transform = `translate(${-text.scrollLeft}px, ${-text.scrollTop}px)`;
  paint.style.overflow = "visible";
  gutter.scrollTop = text.scrollTop;
}

async function check() {
  const checked = text.value;
  let found, values = null;
  try { ({ problems: found, values } = await ask("/recipe/check", { path, text: checked })); } catch (error) { found = [{ line: null, text: error.message }]; }
  if (checked !== text.value) return;
  fill(values);
  marked = new Set(found.map((one) => one.line).filter(Boolean));
  draw();
  if (!found.length) {
    problems.replaceChildren(Object.assign(document.createElement("p"), { className: "fine", textContent: "No problem in what is written." }));
    return;
  }
  const items = document.createElement("ul");
  for (const one of found) {
    const item = document.createElement("li");
    const jump = Object.assign(document.createElement("button"), { className: "plain", type: "button", textContent: one.line ? `line ${one.line}` : one.place || "" });
    if (one.line) jump.onclick = () => goTo(one.line);
    item.append(...(jump.textContent ? [jump] : []), one.text);
    items.append(item);
  }
  problems.replaceChildren(items);
}

// --- the form of keys: it shows what the text has, and a change of it is written into the text

function fill(values) {
  for (const field of formFields) {
    field.disabled = !values; // no YAML at the moment
    if (!values || field === document.activeElement) continue;
    const { written, holds } = values[field.dataset.key];
    if (field.matches("select")) {
      field.options[0].textContent = holds && !written ? `(${holds})` : "";
      if (written && ![...field.options].some((one) => one.value === written)) field.append(new Option(written));
    } else field.placeholder = holds;
    field.value = written;
  }
}

async function setKey(field) {
  const before = text.value, problem = find(".keys-form .problem");
  let said;
  try { said = await ask("/recipe/set", { path, text: before, key: field.dataset.key, value: field.value }); } catch (error) { said = { error: error.message }; }
  problem.textContent = said.error || "";
  problem.hidden = !said.error;
  if (before !== text.value) return; // someone has typed meanwhile: the check shows which value holds
  if (!said.error && said.text !== before) { text.value = said.text; draw(); }
  check();
}

function goTo(line) {
  const lines = text.value.split("\n"), at = lines.slice(0, line - 1).reduce((sum, one) => sum + one.length + 1, 0);
  text.focus();
  text.setSelectionRange(at, at + lines[line - 1].length);
  text.scrollTop = (line - 4) * LINE;
}

async function write() {
  if (text.value === onDisk) return;
  const content = text.value;
  saved.textContent = "saving";
  try {
    version = (await ask("/recipe/save", { path, text: content, version })).version;
    onDisk = content;
    saved.textContent = "saved";
    draw();
  } catch (error) { saved.textContent = error.message; throw error; }
}

// --- completion

const resolved = (node) => node?.$ref ? resolved(schema.$defs[node.$ref.split("/").at(-1)]) : node;
const branches = (node) => { const one = resolved(node); return one?.anyOf ? one.anyOf.flatMap(branches) : one ? [one] : []; };

// The keys above a line by their indentation: ["data", "train"].
function parents(lines, at, indent) {
  const keys = [];
  for (let n = at - 1; n >= 0 && indent > 0; n--) {
    const match = /^(\s*)(- )?(\s*)([\w-]+):/.exec(lines[n]);
    if (!match || /^\s*#/.test(lines[n])) continue;
    const depth = match[1].length + (match[2] ? 2 + match[3].length : 0);
    if (depth < indent) { keys.unshift(match[4]); indent = match[1].length < depth ? match[1].length : depth; }
  }
  return keys;
}

function sections(keys) {
  let nodes = branches(schema);
  for (const key of keys) {
    nodes = nodes.flatMap((node) => branches(node.properties?.[key] || (typeof node.additionalProperties === "object" && node.additionalProperties)));
    nodes = nodes.flatMap((node) => node.items ? [node, ...branches(node.items)] : [node]);
  }
  return nodes;
}

function about(node) {
  const kinds = branches(node).map((one) => one.enum ? one.enum.join(" | ") : one.const ?? one.type).filter(Boolean);
  const kind = [...new Set(kinds)].join(" | ");
  return [resolved(node)?.description || kind, node.default === undefined || node.default === null ? "" : `default ${JSON.stringify(node.default)}`].filter(Boolean).join("; ");
}

function offers() {
  const before = text.value.slice(0, text.selectionStart), lines = before.split("\n"), line = lines.at(-1);
  if (/#/.test(line)) return [];
  const inline = /^(\s*)(?:- )?(?:([\w-]+):\s*)?\{(.*)$/.exec(line); // data.train: {path: ...
  const part = (inline ? inline[3].split(",").at(-1) : line.replace(/^\s*- /, (dash) => " ".repeat(dash.length)));
  const word = /([\w.-]*)$/.exec(line)[1], indent = /^\s*/.exec(part)[0].length;
  let keys = inline ? [...parents(lines, lines.length - 1, inline[1].length), ...(inline[2] ? [inline[2]] : [])] : parents(lines, lines.length - 1, indent);
  const value = /^\s*([\w-]+):\s+(?:\[.*)?[\w.-]*$/.exec(part);
  if (value) {
    const nodes = sections([...keys, value[1]]);
    const values = nodes.flatMap((node) => node.enum || (node.const !== undefined ? [node.const] : node.type === "boolean" ? [true, false] : node.type === "null" ? [null] : []));
    return [...new Set(values)].map((one) => ({ insert: String(one), shown: String(one), about: "", word }));
  }
  if (!/^\s*[\w-]*$/.test(part)) return [];
  const nodes = sections(keys), present = new Set();
  const seen = {};
  for (const node of nodes) for (const [key, described] of Object.entries(node.properties || {})) seen[key] ||= described;
  return Object.entries(seen).filter(([key]) => !present.has(key)).map(([key, described]) => ({ insert: `${key}: `, shown: key, about: about(described), word }));
}

function offer(isAsked) {
  if (!schema) return;
  const found = offers(), word = found[0]?.word || "";
  offered = found.filter((one) => one.shown.startsWith(word) && (one.shown !== word || isAsked)).slice(0, 60);
  if (!offered.length || (!isAsked && !word)) { list.hidden = true; return; }
  chosen = 0;
  const lines = text.value.slice(0, text.selectionStart).split("\n");
  const canvas = (offer.canvas ||= document.createElement("canvas").getContext("2d"));
  canvas.font = getComputedStyle(text).font;
  const across = canvas.measureText(lines.at(-1).slice(0, lines.at(-1).length - word.length)).width;
  list.hidden = false;
  list.replaceChildren(...offered.map((one, at) => {
    const item = document.createElement("li");
    item.role = "option";
    item.append(Object.assign(document.createElement("b"), { textContent: one.shown }), Object.assign(document.createElement("small"), { textContent: one.about }));
    item.onmousedown = (event) => { event.preventDefault(); chosen = at; take(); };
    return item;
  }));
  mark();
  const below = TOP + lines.length * LINE - text.scrollTop;
  list.style.left = `${Math.max(4, Math.min(LEFT + across - text.scrollLeft, text.clientWidth - list.offsetWidth - 4))}px`;
  list.style.top = `${below + list.offsetHeight < text.clientHeight ? below : Math.max(4, below - LINE - list.offsetHeight)}px`;
}

function mark() {
  [...list.children].forEach((item, at) => item.setAttribute("aria-selected", at === chosen));
  list.children[chosen]?.scrollIntoView({ block: "nearest" });
}

function take() {
  const { insert, word } = offered[chosen];
  text.setRangeText(insert, text.selectionStart - word.length, text.selectionStart, "end");
  list.hidden = true;
  text.dispatchEvent(new Event("input"));
  list.hidden = true;
}

text.addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key === "s") { event.preventDefault(); write().catch(() => {}); return; }
  if (event.ctrlKey && event.key === " ") { event.preventDefault(); offer(true); return; }
  if (!list.hidden) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) { event.preventDefault(); chosen = (chosen + step + offered.length) % offered.length; mark(); return; }
    if (event.key === "Enter" || event.key === "Tab") { event.preventDefault(); take(); return; }
    if (event.key === "Escape") { list.hidden = true; return; }
  }
  if (event.key === "Enter") { // keeps the indentation
    event.preventDefault();
    const line = text.value.slice(0, text.selectionStart).split("\n").at(-1);
    const more = /:\s*$/.test(line) ? "  " : "";
    text.setRangeText(`\n${/^\s*/.exec(line)[0]}${more}`, text.selectionStart, text.selectionEnd, "end");
    text.dispatchEvent(new Event("input"));
  }
});
let timer;
text.addEventListener("input", () => { draw(); offer(false); clearTimeout(timer); timer = setTimeout(check, 350); });
text.addEventListener("scroll", () => { scrolled(); list.hidden = true; });
text.addEventListener("blur", () => { list.hidden = true; });
for (const field of formFields) field.addEventListener("change", () => setKey(field));
save.addEventListener("click", () => write().catch(() => {}));
// A command reads the file: what is edited is saved first.
document.addEventListener("before-command", (event) => event.detail.push(write()));
addEventListener("beforeunload", (event) => { if (text.value !== onDisk) event.preventDefault(); });
ask("/schema.json").then((read) => { schema = read; });
draw();
check();
