"use strict";
// Takes runs of tokens apart where someone looks closer (page.py says how they are written), finds text, folds long examples.
const root = document.documentElement;
const tip = document.getElementById("tip");
const texts = [...document.querySelectorAll("article .text")];
const FOLDED = 420; // pixels that a long example shows at first

// A run becomes one <i> per token; the text and the marks in it stay what they are.
function split(run) {
  if (run.dataset.split || !run.dataset.i) return;
  run.dataset.split = "yes";
  const ids = run.dataset.i.split(" ");
  const sizes = run.dataset.n ? run.dataset.n.split(" ").map(Number) : [Infinity];
  const parts = new Map((run.dataset.b || "").split("|").filter(Boolean).map((one) => {
    const cut = one.indexOf(" ");
    return [Number(one.slice(0, cut)), one.slice(cut + 1)];
  }));
  const nodes = [...run.childNodes];
  const made = [];
  let left = 0;
  const next = () => {
    const k = made.length;
    const token = document.createElement("i");
    token.dataset.id = ids[k];
    token.dataset.p = Number(run.dataset.p) + k;
    if (parts.has(k)) token.dataset.b = parts.get(k);
    left = sizes[k];
    made.push(token);
  };
  const here = () => {
    while (!left && made.length < ids.length) next();
    return made[made.length - 1];
  };
  for (const node of nodes) {
    if (node.nodeType !== Node.TEXT_NODE) {
      here().append(node);
      if (node.dataset.c) left -= String.fromCodePoint(parseInt(node.dataset.c, 16)).length;
      continue;
    }
    for (let data = node.data; data; ) {
      const token = here();
      const piece = data.slice(0, Math.min(left, data.length));
      token.append(piece);
      left -= piece.length;
      data = data.slice(piece.length);
    }
  }
  while (made.length < ids.length) next();
  for (const token of made) token.classList.toggle("nl", token.textContent.endsWith("\n")); // its id goes before the line's end
  run.replaceChildren(...made);
}

function splitAll(text) {
  for (const run of text.querySelectorAll("[data-i]")) split(run);
}

// Runs are taken apart as they come near the window: a page may hold a hundred thousand tokens.
const near = new IntersectionObserver((entries) => {
  if (!root.classList.contains("borders")) return;
  for (const entry of entries) if (entry.isIntersecting) splitAll(entry.target);
}, { rootMargin: "600px" });

function watch() {
  near.disconnect();
  for (const text of texts) near.observe(text);
}

// --- what a token is

let current = null;

function show(token) {
  if (current) current.classList.remove("on");
  current = token;
  tip.hidden = !token;
  if (!token) return;
  token.classList.add("on");
  const supervised = token.parentElement.localName === "mark";
  const line = (...pieces) => {
    const div = document.createElement("div");
    div.append(...pieces);
    return div;
  };
  const strong = document.createElement("b");
  strong.textContent = supervised ? "supervised" : "context";
  tip.replaceChildren(line(`id ${token.dataset.id}, position ${token.dataset.p}`), line(strong));
  if (token.dataset.b) tip.append(line(`bytes ${token.dataset.b}`));
  const box = token.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left), innerWidth - size.width - 8);
  const below = box.bottom + 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${below + size.height > innerHeight ? Math.max(8, box.top - size.height - 6) : below}px`;
}

function tokenAt(event) {
  const run = event.target.closest?.("article .text [data-i]");
  if (!run) return null;
  if (!run.dataset.split) {
    split(run);
    return document.elementFromPoint(event.clientX, event.clientY)?.closest("i[data-id]") ?? null;
  }
  return event.target.closest("i[data-id]");
}

document.addEventListener("pointerover", (event) => show(tokenAt(event)));
document.addEventListener("click", (event) => show(tokenAt(event)));
document.addEventListener("scroll", () => { if (current && !current.closest(".text").matches(":focus")) show(null); }, { passive: true });

for (const text of texts) {
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return show(null);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey) return undefined;
    event.preventDefault();
    splitAll(text);
    const tokens = [...text.querySelectorAll("i[data-id]")];
    const at = tokens.indexOf(current);
    const wanted = at < 0 ? (step > 0 ? 0 : tokens.length - 1) : Math.min(Math.max(at + step, 0), tokens.length - 1);
    tokens[wanted].scrollIntoView({ block: "nearest", inline: "nearest" });
    return show(tokens[wanted]);
  });
  text.addEventListener("blur", () => show(null));
}

// --- how examples are shown

for (const box of document.querySelectorAll("[data-toggle]")) {
  const apply = () => {
    root.classList.toggle(box.dataset.toggle, box.checked);
    if (box.dataset.toggle === "ids" && box.checked && !root.classList.contains("borders")) {
      const borders = document.querySelector("[data-toggle=borders]");
      borders.checked = true;
      borders.dispatchEvent(new Event("change"));
    }
    if (box.dataset.toggle === "borders") watch();
  };
  box.addEventListener("change", apply);
  apply();
}

for (const text of texts) {
  if (text.scrollHeight <= FOLDED * 1.3) continue;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "fold";
  const fold = (folded) => {
    text.classList.toggle("folded", folded);
    button.textContent = folded ? "Show all of it" : "Show less";
    button.setAttribute("aria-expanded", String(!folded));
  };
  button.addEventListener("click", () => fold(!text.classList.contains("folded")));
  fold(true);
  text.after(button);
}

// --- finding text

const find = document.getElementById("find");
const found = document.getElementById("found");
const articles = [...document.querySelectorAll("article")];

// Ranges of `query` within an article's texts, over the borders of runs and tokens.
function ranges(article, query) {
  const hits = [];
  for (const text of article.querySelectorAll(".text")) {
    const walker = document.createTreeWalker(text, NodeFilter.SHOW_TEXT);
    const nodes = [];
    let whole = "";
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      nodes.push([whole.length, node]);
      whole += node.data;
    }
    const lower = whole.toLowerCase();
    if (lower.length !== whole.length) continue; // letters whose lower case is longer: found, not highlighted
    const place = (at) => {
      let low = 0;
      for (let high = nodes.length - 1; low < high; ) {
        const middle = (low + high + 1) >> 1;
        if (nodes[middle][0] <= at) low = middle; else high = middle - 1;
      }
      return [nodes[low][1], at - nodes[low][0]];
    };
    for (let at = lower.indexOf(query); at >= 0; at = lower.indexOf(query, at + query.length)) {
      const range = new Range();
      range.setStart(...place(at));
      const [node, offset] = place(at + query.length - 1);
      range.setEnd(node, offset + 1);
      hits.push(range);
    }
  }
  return hits;
}

function filter() {
  const query = find.value.toLowerCase();
  const hits = [];
  let shown = 0;
  for (const article of articles) {
    const hit = !query || article.textContent.toLowerCase().includes(query);
    article.hidden = !hit;
    shown += hit;
    if (query && hit) hits.push(...ranges(article, query));
  }
  found.textContent = query ? `${shown} of ${articles.length}` : "";
  if (globalThis.CSS?.highlights) CSS.highlights.set("found", new Highlight(...hits));
}
find.addEventListener("input", filter);
find.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { find.value = ""; filter(); }
});
if (find.value) filter(); // a browser that kept it over a reload

root.dataset.ready = String(texts.length);
