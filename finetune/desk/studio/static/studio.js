"use strict";
// The studio's forms: each shows the command that its button runs, runs it, and follows what it prints. No libraries.
const POLL_MS = 900, PARTS_MS = 2500;
const find = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

async function ask(address, values) {
  let answer;
  try {
    answer = await fetch(address, values && {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(values),
    });
  } catch { throw new Error("the studio does not answer: has it ended? Its commands go on without it"); }
  const text = await answer.text();
  let read = {};
  try { read = JSON.parse(text); } catch { read = { error: text.trim() }; }
  if (!answer.ok) throw new Error(read.error || `the studio answers ${answer.status}`);
  return read;
}

find(".places [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });

// --- forms of commands

function valuesOf(form) {
  const values = {};
  for (const field of form.elements) {
    if (!field.name) continue;
    if ("many" in field.dataset) (values[field.name] ||= []).push(field.value);
    else values[field.name] = field.type === "checkbox" ? field.checked : field.value;
  }
  const places = all(".place-row", form).map((row) => `${find(".how-many", row).value || 1}x${find(".device", row).value}`);
  if (places.length) values.on = places;
  return values;
}

function complain(form, message) {
  const problem = find(".problem", form);
  problem.textContent = message;
  problem.hidden = !message;
}

async function preview(form) {
  const turn = (form.turn = (form.turn || 0) + 1);
  const command = find(".command", form), button = find(".go > button", form);
  let said;
  try { said = await ask(`/preview/${form.dataset.action}`, valuesOf(form)); } catch (error) { said = { command: "", problem: error.message }; }
  if (turn !== form.turn) return;
  command.textContent = said.command;
  button.disabled = !said.command;
  // A form that nobody has touched does not complain of what is not filled in yet.
  const isEmpty = !form.dataset.touched && said.problem?.includes(": nothing is chosen.");
  complain(form, isEmpty ? "" : said.problem || "");
}

async function start(event) {
  event.preventDefault();
  const form = event.currentTarget;
  form.dataset.touched = "yes";
  const before = new CustomEvent("before-command", { detail: [], bubbles: true }); // such as saving what is edited
  form.dispatchEvent(before);
  try {
    await Promise.all(before.detail);
    const { job, then } = await ask(`/start/${form.dataset.action}`, valuesOf(form));
    complain(form, "");
    follow(form, job, then);
    all("[data-poll]").forEach(refresh);
  } catch (error) { complain(form, error.message); }
}

function show(form, text) {
  const output = find(".output", form);
  const atEnd = output.scrollTop + output.clientHeight > output.scrollHeight - 30;
  for (const line of text.split(/(?<=\n)/)) {
    const part = document.createElement("span");
    part.textContent = line;
    if (/^(\[rank \d+\] )?error: /.test(line)) part.className = "wrong";
    output.append(part);
  }
  if (atEnd) output.scrollTop = output.scrollHeight;
}

async function follow(form, job, then) {
  const turn = (form.follows = (form.follows || 0) + 1);
  const result = find(".result", form), chip = find(".progress .chip", form), stop = find(".stop", form);
  const after = find(".then", form), alone = find(".alone", form), clock = find(".clock", form);
  find(".output", form).replaceChildren();
  find(".said", form).open = true;
  all("iframe, .working", result).forEach((old) => old.remove());
  const working = document.createElement("div");
  working.className = "working";
  find(".progress", form).after(working);
  result.hidden = false;
  if (after) after.hidden = alone.hidden = true;
  if (stop) {
    stop.onclick = async () => { try { await ask(`/jobs/${job}/stop`, {}); stop.textContent = "stop at once"; } catch (error) { complain(form, error.message); } };
    stop.textContent = "stop";
  }
  let at = 0;
  for (;;) {
    let said;
    try { said = await ask(`/jobs/${job}?start=${at}`); } catch (error) { complain(form, error.message); break; }
    if (turn !== form.follows || !form.isConnected) return;
    show(form, said.text);
    chip.textContent = said.state;
    chip.className = `chip ${said.kind}`;
    working.hidden = !said.running;
    if (stop) stop.hidden = !said.running;
    if (said.running) clock.textContent = said.seconds < 120 ? `${said.seconds} s` : `${Math.round(said.seconds / 60)} min`;
    form.dispatchEvent(new CustomEvent("command", { detail: { job, ...said }, bubbles: true }));
    if (said.text && said.next > at && !said.running) { at = said.next; continue; } // the rest
    at = said.next;
    if (!said.running) {
      working.remove();
      if (said.page && alone) {
        if ("frame" in form.dataset) { find(".said", form).open = false; result.append(frame(said.page)); form.querySelector(".progress").scrollIntoView({ block: "center" }); }
        alone.href = said.page;
        alone.hidden = false;
      }
      if (said.kind === "finished" && then) { after.href = then; after.hidden = false; }
      return;
    }
    if (then && form.dataset.action === "launch") { after.href = then; after.hidden = false; after.textContent = "watch it"; }
    await new Promise((done) => setTimeout(done, POLL_MS));
  }
  working.remove();
}

function frame(address) {
  const made = document.createElement("iframe");
  made.className = "page";
  made.src = address;
  made.title = "the page that the command wrote";
  return made;
}

function wire(within) {
  for (const form of all("form.action", within)) {
    if (form.dataset.job) { follow(form, Number(form.dataset.job)); continue; }
    form.addEventListener("submit", start);
    let timer;
    form.addEventListener("input", () => { form.dataset.touched = "yes"; clearTimeout(timer); timer = setTimeout(() => preview(form), 150); });
    preview(form);
  }
  all("iframe.fits", within).forEach(fits);
}
document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.matches(".copy")) {
    await navigator.clipboard.writeText(find(".command", button.parentElement).textContent);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1200);
  }
  if (button.matches(".stop-job")) {
    button.disabled = true;
    try { await ask(`/jobs/${button.dataset.job}/stop`, {}); } catch { button.disabled = false; }
    all("[data-poll]").forEach(refresh);
  }
  if (button.matches(".add, .remove")) {
    const form = button.closest("form"), rows = all(".place-row", form);
    if (button.matches(".remove")) button.closest(".place-row").remove();
    else {
      const copy = rows.at(-1).cloneNode(true);
      find(".device", copy).value = find(".device", rows.at(-1)).value;
      rows.at(-1).after(copy);
    }
    form.dispatchEvent(new Event("input"));
  }
});

// --- parts of pages that are asked for again

// A polled region has parts, and each is replaced when the studio writes it otherwise: `text` is what it wrote last.
async function refresh(region) {
  let answer;
  try { answer = await fetch(region.dataset.poll); } catch { return; } // it has ended, or will answer again
  if (!answer.ok) return;
  const read = document.createElement("template");
  read.innerHTML = await answer.text(); // made by the studio's own templates
  for (const part of all("[data-part]", read.content)) {
    const old = find(`[data-part=${part.dataset.part}]`, region), text = part.outerHTML;
    if (!old || old.text === text || old.contains(document.activeElement?.closest("input, select, textarea"))) continue;
    part.text = text;
    old.replaceWith(part);
    wire(part);
    if (part.dataset.part === "stamp") all("iframe.fits").forEach(redraw);
  }
}

for (const region of all("[data-poll]")) {
  for (const part of all("[data-part]", region)) part.text = part.outerHTML;
  setInterval(() => { if (!document.hidden) refresh(region); }, PARTS_MS);
}

// A report has the studio's origin, so the frame can be as high as its page.
function fits(one) {
  const fit = () => {
    const page = one.contentDocument?.documentElement;
    if (page) one.style.height = `${Math.max(320, page.scrollHeight + 4)}px`;
  };
  one.addEventListener("load", () => {
    // A bar that scrolls makes the page narrower, so its curves lower, and so stays where nothing has to be scrolled.
    if (one.contentDocument) one.contentDocument.documentElement.style.overflowY = "hidden";
    fit();
    if (one.contentDocument) new ResizeObserver(fit).observe(one.contentDocument.body);
  });
}

// Reads a report again behind the one that is shown, and shows it as that one was: opened parts, and how curves are drawn.
function redraw(old) {
  if (old.nextElementSibling?.matches("iframe.loading")) return;
  const next = Object.assign(document.createElement("iframe"), { className: "page fits loading", src: old.src, title: old.title });
  fits(next);
  next.addEventListener("load", () => {
    const before = old.contentDocument, after = next.contentDocument;
    if (before && after) {
      const opened = all("details", before).map((one) => one.open);
      all("details", after).forEach((one, at) => { if (at < opened.length) one.open = opened[at]; });
      const controls = find("#controls", after);
      for (const field of find("#controls", before)?.elements ?? []) {
        const same = field.name && controls?.elements[field.name];
        if (same) { same.value = field.value; same.checked = field.checked; }
      }
      controls?.dispatchEvent(new Event("input", { bubbles: true }));
    }
    next.classList.remove("loading");
    old.remove();
  }, { once: true });
  old.after(next);
}
wire(document);
for (const form of all("form.open, form.picked")) form.addEventListener("change", () => form.requestSubmit());

// --- roles of columns

const table = find(".rows-of");
if (table) {
  const selects = all("select.role", table), fields = find("form[data-action=new]").elements;
  const use = () => {
    fields.columns.value = selects.filter((one) => one.value).map((one) => `${one.value}=${one.dataset.column}`).join(",");
    fields.data.value = table.dataset.path;
    fields.columns.dispatchEvent(new Event("input", { bubbles: true }));
  };
  for (const select of selects) {
    select.addEventListener("change", () => {
      for (const other of selects) if (other !== select && other.value === select.value) other.value = ""; // one column for each
      use();
    });
  }
  find(".use-roles", table)?.addEventListener("click", use);
}

// --- chat

const talk = find(".talk");
if (talk) {
  const state = { job: null, models: [], turns: {} }; // turns: of each model
  const load = find("form[data-action=serve]"), turns = find(".turns", talk);
  const base = () => all(".hint.base").forEach((hint) => { hint.hidden = hint.dataset.run !== load.elements.run.value; });
  load.addEventListener("input", base);
  base();

  async function use(job) {
    const { ready, models } = await ask(`/chat/${job}`);
    if (!ready) return;
    Object.assign(state, { job, models, turns: Object.fromEntries(models.map((name) => [name, []])) });
    turns.replaceChildren();
    talk.hidden = false;
    load.classList.add("loaded");
    find("textarea", talk).placeholder = `${models.length > 1 ? "Ask both. " : ""}Enter sends, Shift-Enter begins a line.`;
    find("textarea", talk).focus();
  }

  load.addEventListener("command", async ({ detail }) => {
    if (detail.running && state.job !== detail.job && /^serving /m.test(find(".output", load).textContent)) await use(detail.job);
    if (!detail.running && state.job === detail.job) { talk.hidden = true; state.job = null; load.classList.remove("loaded"); }
  });
  const loaded = all(".serving").at(0);
  if (loaded) follow(load, Number(loaded.dataset.job)); // by an earlier page

  async function answer(model, place, signal) {
    const system = find("[name=system]", talk).value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...state.turns[model]];
    const thought = Object.assign(document.createElement("p"), { className: "thought" });
    const text = Object.assign(document.createElement("p"), { className: "waiting" });
    place.append(thought, text);
    try {
      const got = await fetch(`/chat/${state.job}`, {
        method: "POST", headers: { "Content-Type": "application/json" }, signal,
        body: JSON.stringify({ model, messages, temperature: Number(find("[name=temperature]", talk).value), max_new_tokens: Number(find("[name=most]", talk).value) }),
      });
      if (!got.ok) throw new Error(JSON.parse(await got.text()).error);
      let rest = "";
      for await (const piece of got.body.pipeThrough(new TextDecoderStream())) {
        const lines = (rest + piece).split("\n");
        rest = lines.pop();
        for (const line of lines.map(JSON.parse)) {
          if (line.error) throw new Error(line.error);
          if (line.thought) thought.textContent += line.thought;
          if (line.text) text.textContent += line.text;
        }
      }
      state.turns[model].push({ role: "assistant", content: text.textContent });
    } catch (error) {
      const broke = Object.assign(document.createElement("p"), { className: "wrong", textContent: error.message });
      place.append(broke);
      state.turns[model].pop(); // a turn without an answer is no part of a conversation
    }
    text.classList.remove("waiting");
  }

  const form = find(".ask", talk), box = find("textarea", form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const question = box.value.trim(), button = find("button", form);
    if (!question || button.disabled) return;
    box.value = "";
    button.disabled = true;
    const turn = document.createElement("div"), asked = document.createElement("p"), answers = document.createElement("div");
    turn.className = "turn";
    Object.assign(asked, { className: "question", textContent: question });
    answers.className = "answers";
    turn.append(asked, answers);
    turns.append(turn);
    for (const model of state.models) { // one after the other: so does the server
      const place = document.createElement("div");
      place.append(Object.assign(document.createElement("h3"), { textContent: model }));
      answers.append(place);
      state.turns[model].push({ role: "user", content: question });
      turn.scrollIntoView({ block: "nearest" });
      await answer(model, place);
    }
    button.disabled = false;
    turn.scrollIntoView({ block: "nearest" });
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); }
  });
  find(".clear", talk).addEventListener("click", () => {
    turns.replaceChildren();
    for (const name of state.models) state.turns[name] = [];
  });
}
