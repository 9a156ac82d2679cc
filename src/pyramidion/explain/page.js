/* Show an explanation: `pyramidion.mount(data, root)`, with the data of `Explanation.to_dict()`.
 *
 * Whatever a text holds is put into text nodes, never into markup. Every word is one element; what is known of them is
 * in arrays, and a change of the slider or of the word in focus touches the elements that look different after it.
 */
"use strict";

globalThis.pyramidion = (() => {
  const LEVELS = [0.02, 0.1, 0.25, 0.5]; // of survival, from which on a shade begins
  const MARKED = 40; // words that are underlined at most
  const LISTED = 8; // words that are listed at most
  const ORIGINS = 3; // likewise, of those that a word was copied from
  const LONG = 200; // words of a paragraph: a browser takes seconds for one of thousands
  // What would be invisible, or would turn the direction of its neighbours, gets a sign of its own.
  const STRANGE = /(?![\u200c\u200d])[\0-\x08\x0e-\x1f\x7f-\x9f\u115f\u180e\p{Cf}]/gu; // joiners are writing
  const NEWLINE = /[\n\r\u2028\u2029]/u;

  /* ---- Small things ------------------------------------------------------------------------------- */

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children); // a string becomes a text node
    return element;
  }

  const count = (number) => number.toLocaleString("en");
  const percent = (share) => {
    if (share > 0 && share < 0.00095) return "<0.1%";
    return `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`;
  };
  const many = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

  /* Python counts characters, the browser their halves where they have two. */
  function places(text) {
    const found = new Uint32Array(text.length + 1);
    let characters = 0,
      units = 0;
    for (const character of text) {
      found[characters++] = units;
      units += character.length;
    }
    found[characters] = units;
    return found;
  }

  /* The `most` largest of some values, as places, from the largest down; zeros are left out. */
  function largest(values, most) {
    const found = [];
    let least = 0;
    for (let i = 0; i < values.length; i++) {
      if (values[i] <= least) continue;
      let place = found.length;
      while (place > 0 && values[found[place - 1]] < values[i]) place--;
      found.splice(place, 0, i);
      if (found.length > most) found.pop();
      if (found.length === most) least = values[found[most - 1]];
    }
    return found;
  }

  /* ---- A text of words, one of which has the focus ------------------------------------------------ */

  class Reading {
    constructor(text, words, blocks, label) {
      this.text = text;
      this.words = words;
      this.size = words.start.length;
      this.at = places(text);
      this.current = 0;
      this.spans = new Array(this.size);
      this.place = new Map(); // from an element to its word
      this.element = make("div", { class: "reading", role: "group", "aria-label": label });
      this.fill(blocks);
      this.rove(0);
    }

    slice(start, end) {
      return this.text.slice(this.at[start], this.at[end]);
    }

    word(i) {
      return this.slice(this.words.start[i], this.words.end[i]);
    }

    /* The word as it can be said, in a list or aloud. */
    name(i) {
      const word = this.word(i);
      if (word.trim()) return word;
      if (word) return NEWLINE.test(word) ? "line break" : "white space";
      return i === this.size - 1 ? "end of the text" : "no character";
    }

    fill(blocks) {
      let place = 0,
        i = 0;
      this.first = []; // the first word of each paragraph
      blocks.forEach((block, number) => {
        const last = number === blocks.length - 1;
        let node = this.paragraph(block.heading ? "h3" : "p", i);
        for (; i < this.size && (last || this.words.start[i] < block.end); i++) {
          if (place < this.words.start[i]) node.append(this.slice(place, this.words.start[i]));
          if (this.isLong(i)) {
            node.classList.add("open");
            node = this.paragraph("p", i);
          }
          node.append(this.span(i));
          place = this.words.end[i];
        }
        if (place < block.end) node.append(this.slice(place, block.end));
        place = Math.max(place, block.end);
      });
      this.first.push(this.size);
    }

    paragraph(tag, i) {
      const node = make(tag, { dir: "auto" });
      this.first.push(i);
      this.element.append(node);
      return node;
    }

    /* Tell whether a paragraph has become so long that it should go on in a new one, best behind a sentence. */
    isLong(i) {
      const words = i - this.first[this.first.length - 1];
      return words >= 2 * LONG || (words >= LONG && /[.!?。！？]$/u.test(this.word(i - 1)));
    }

    span(i) {
      const word = this.word(i),
        span = document.createElement("span");
      let kind = "w s1";
      if (!word) kind += i === this.size - 1 ? " end" : " none";
      else if (!word.trim()) kind += NEWLINE.test(word) ? " blank" : " blank space";
      const codes = word.match(STRANGE);
      if (codes) {
        kind += " strange";
        const named = codes.slice(0, 3).map((code) => code.codePointAt(0).toString(16).toUpperCase().padStart(4, "0"));
        span.setAttribute("data-code", named.join(" ") + (codes.length > 3 ? " …" : ""));
      }
      span.className = kind;
      span.textContent = word;
      span.tabIndex = -1;
      this.spans[i] = span;
      this.place.set(span, i);
      return span;
    }

    /* Give one word the place in the order of the tab key. */
    rove(i) {
      const before = this.spans[this.current],
        now = this.spans[i];
      before.tabIndex = -1;
      before.removeAttribute("role");
      before.removeAttribute("aria-label");
      now.tabIndex = 0;
      now.setAttribute("role", "button");
      now.setAttribute("aria-label", this.name(i));
      this.current = i;
    }

    find(target) {
      const span = target instanceof Element ? target.closest(".w") : null;
      return span && this.place.has(span) ? this.place.get(span) : -1;
    }

    /* The word that a key leads to; -1: the key is not one of ours. */
    after(key, i, far) {
      const last = this.size - 1;
      if (key === "ArrowRight") return Math.min(i + 1, last);
      if (key === "ArrowLeft") return Math.max(i - 1, 0);
      if (key === "ArrowDown") return this.line(i, 1);
      if (key === "ArrowUp") return this.line(i, -1);
      if (key === "Home") return far ? 0 : this.edge(i, -1);
      if (key === "End") return far ? last : this.edge(i, 1);
      return -1;
    }

    /* The nearest word in the next line. */
    line(i, step) {
      const here = this.spans[i].getBoundingClientRect(),
        middle = here.left + here.width / 2;
      let best = i,
        nearest = Infinity,
        row = null;
      for (let j = i + step; j >= 0 && j < this.size; j += step) {
        const box = this.spans[j].getBoundingClientRect();
        const centre = box.top + box.height / 2;
        if (step > 0 ? centre < here.bottom : centre > here.top) continue;
        if (row === null) row = centre;
        if (Math.abs(centre - row) > box.height / 2) break;
        const distance = Math.abs(box.left + box.width / 2 - middle);
        if (distance < nearest) [best, nearest] = [j, distance];
      }
      return best;
    }

    /* The first or last word of the paragraph. */
    edge(i, step) {
      const parent = this.spans[i].parentNode;
      while (this.spans[i + step] && this.spans[i + step].parentNode === parent) i += step;
      return i;
    }
  }

  /* ---- What is known ------------------------------------------------------------------------------ */

  class Account {
    constructor(data) {
      this.words = data.words;
      this.size = data.words.start.length;
      this.n = data.words.token[this.size];
      this.written = data.written;
      this.attention = data.attention;
      this.copies = data.copied; // null: a model that does not copy
      this.stages = data.stages.map((stage) => ({
        name: stage.name,
        k: stage.k,
        slots: Int32Array.from(stage.slots),
        weights: Float64Array.from(stage.weights),
      }));
      this.memory = this.stages[this.stages.length - 1];
      this.wordOf = new Uint32Array(this.n);
      for (let i = 0; i < this.size; i++) this.wordOf.fill(i, this.words.token[i], this.words.token[i + 1]);
    }

    /* For each word the largest share of a slot that one of its tokens holds. */
    survival(stage) {
      const found = new Float64Array(this.size);
      for (let t = 0; t < this.n; t++) found[this.wordOf[t]] = Math.max(found[this.wordOf[t]], stage.weights[t]);
      return found;
    }

    /* For each word what its tokens hold of all slots; the sum over words is 1. */
    held(stage) {
      const found = new Float64Array(this.size);
      for (let t = 0; t < this.n; t++) found[this.wordOf[t]] += stage.weights[t] / stage.k;
      return found;
    }

    /* The tokens of each slot, found when first asked for. */
    members(stage) {
      if (!stage.members) {
        stage.members = Array.from({ length: stage.k }, () => []);
        stage.slots.forEach((slot, t) => slot >= 0 && stage.members[slot].push(t));
      }
      return stage.members;
    }

    /* For each source word what a word of the summary drew on it: attention to its slot times its weight there. */
    drawn(word) {
      const first = this.written.token[word],
        last = this.written.token[word + 1];
      const paid = new Float64Array(this.memory.k);
      for (let t = first; t < last; t++)
        this.attention[t].forEach((part, slot) => (paid[slot] += part / (last - first)));
      const found = new Float64Array(this.size),
        { slots, weights } = this.memory;
      for (let t = 0; t < this.n; t++) if (slots[t] >= 0) found[this.wordOf[t]] += paid[slots[t]] * weights[t];
      return found;
    }

    /* For each source word how much of a word of the summary was copied from it; the sum is what was copied of it. */
    copied(word) {
      const found = new Float64Array(this.size),
        first = this.written.token[word],
        last = this.written.token[word + 1];
      if (this.copies)
        for (let t = first; t < last; t++)
          for (const [token, share] of this.copies[t]) found[this.wordOf[token]] += share / (last - first);
      return found;
    }

    /* For each word of the summary what it drew on one source word. */
    drawers(word) {
      const found = new Float64Array(this.written.start.length);
      for (let w = 0; w < found.length; w++) {
        const first = this.written.token[w],
          last = this.written.token[w + 1];
        for (let t = first; t < last; t++) {
          for (let source = this.words.token[word]; source < this.words.token[word + 1]; source++) {
            const slot = this.memory.slots[source];
            if (slot >= 0) found[w] += (this.attention[t][slot] * this.memory.weights[source]) / (last - first);
          }
        }
      }
      return found;
    }

    /* The slots of a word's tokens, and who else is in them. */
    slots(word, stage) {
      const found = new Map();
      for (let t = this.words.token[word]; t < this.words.token[word + 1]; t++) {
        const slot = stage.slots[t];
        if (slot < 0) continue;
        if (!found.has(slot)) found.set(slot, { slot, own: 0, others: new Map() });
        found.get(slot).own += stage.weights[t];
      }
      for (const one of found.values()) {
        for (const t of this.members(stage)[one.slot]) {
          const other = this.wordOf[t];
          if (other !== word) one.others.set(other, (one.others.get(other) || 0) + stage.weights[t]);
        }
      }
      return [...found.values()].sort((a, b) => b.own - a.own);
    }
  }

  /* ---- The page ----------------------------------------------------------------------------------- */

  class Page {
    constructor(data, root) {
      this.data = data;
      this.account = new Account(data);
      this.source = new Reading(data.source, data.words, data.blocks, "Document. Arrow keys go from word to word.");
      const whole = [{ start: 0, end: Array.from(data.summary).length, heading: false }];
      this.summary = new Reading(data.summary, data.written, whole, "Summary. Arrow keys go from word to word.");
      this.stage = this.account.stages.length - 1;
      this.levels = new Uint8Array(this.account.size).fill(1);
      this.marked = [];
      this.shown = null; // { reading, i, held }
      this.build(root);
      this.listen();
      this.setStage(this.stage);
      this.describeNothing();
    }

    build(root) {
      this.live = make("p", { class: "unseen", role: "status", "aria-live": "polite" });
      this.map = make("canvas", { class: "map", "aria-hidden": "true" });
      this.detail = make("section", { class: "detail idle", "aria-label": "The word in focus" });
      const text = make("main", { class: "source", id: "document" }, make("h2", {}, "Document"), this.source.element);
      const scroll = make("div", { class: "scroll" }, this.summaryPart(), this.sectionsPart(), this.passagesPart());
      const side = make("aside", { class: "side" }, scroll, this.detail);
      const skip = make("a", { class: "skip", href: "#document" }, "To the document");
      const columns = make("div", { class: "columns" }, text, this.map, side);
      this.sheet = make("div", { class: "sheet" }, skip, this.headPart(), this.barPart(), columns, this.live);
      root.replaceChildren(this.sheet);
    }

    headPart() {
      const { account, data } = this;
      const steps = account.stages
        .slice(1)
        .map((stage) => ` → ${count(stage.k)}`)
        .join("");
      const slots = account.stages.length > 1 ? `${steps} ${account.memory.k === 1 ? "slot" : "slots"}` : "";
      const written = account.attention.length;
      const counts = `${many(account.n, "token")}${slots} · ${many(written, "token")} written · model ${data.model}`;
      this.theme = make("button", { class: "theme", type: "button" });
      const head = make("header", { class: "head" }, make("h1", {}, data.title), this.theme);
      head.append(make("p", { class: "figure quiet" }, counts));
      if (data.note) head.append(make("p", { class: "quiet" }, capital(data.note) + "."));
      return head;
    }

    barPart() {
      const { stages } = this.account,
        last = String(stages.length - 1);
      this.slider = make("input", { type: "range", id: "stage", min: "0", max: last, step: "1", value: last });
      this.output = make("output", { for: "stage", class: "figure quiet" });
      const stops = make("ol", { class: "stops figure", "aria-hidden": "true" });
      stops.append(...stages.map((stage, i) => make("li", {}, i ? stage.name : "all tokens")));
      const label = make("label", { for: "stage" }, make("span", {}, "Pooling"), this.output);
      const control = make("div", { class: "stages" }, label, this.slider, stops);
      if (stages.length < 2) control.hidden = true;
      this.meaning = make("p", {});
      const samples = ["under 2%", "2%", "10%", "25%", "50% or more"];
      const shades = samples.map((text, i) => make("span", { class: `w s${i}` }, text));
      this.legend = make("div", { class: "legend figure" }, this.meaning, ...shades);
      return make("nav", { class: "bar", "aria-label": "Pooling layers" }, control, this.legend);
    }

    summaryPart() {
      const part = make("section", { class: "summary", "aria-label": "Summary" }, make("h2", {}, "Summary"));
      part.append(this.summary.element);
      if (this.account.copies) {
        let copied = 0;
        this.summary.spans.forEach((span, i) => {
          if (sum(this.account.copied(i)) < 0.5) return;
          span.classList.add("copied");
          copied++;
        });
        part.append(make("p", { class: "quiet" }, `Dotted: copied from the document, ${many(copied, "word")}.`));
      }
      return part;
    }

    sectionsPart() {
      const list = make("ol", { class: "lines" });
      this.sections = this.data.sections.map((section) => {
        const { start, end, title } = section,
          { token } = this.data.words;
        const share = make("span", { class: "figure" }),
          held = make("i"),
          drawn = make("u"),
          part = make("b");
        const track = make("span", { class: "track" }, held, drawn, part);
        const button = make("button", { type: "button" }, make("span", { class: "name", title }, title), share, track);
        button.addEventListener("click", () => this.jump(start));
        list.append(make("li", {}, button));
        return { start, end, share, held, drawn, part, size: (token[end] - token[start]) / this.account.n };
      });
      this.key = make("p", { class: "quiet" });
      return this.folding("Share kept by section", this.key, list);
    }

    passagesPart() {
      const list = make("ol", { class: "lines passages" });
      for (const passage of this.data.passages.slice(0, 5)) {
        const share = make("span", { class: "figure" }, percent(passage.share));
        const button = make("button", { type: "button" }, make("span", { class: "name" }, passage.text), share);
        button.addEventListener("click", () => this.jump(passage.start));
        list.append(make("li", {}, button));
      }
      return this.folding("Sentences that hold most of the memory", list);
    }

    /* A part that is open where there is room for it beside the document. */
    folding(title, ...children) {
      const part = make("details", {}, make("summary", {}, make("h2", {}, title)), ...children);
      part.open = matchMedia("(min-width: 60rem)").matches;
      return part;
    }

    /* ---- What happens ------------------------------------------------------------------------------- */

    listen() {
      this.ended = new AbortController();
      const { signal } = this.ended;
      for (const reading of [this.source, this.summary]) this.follow(reading, signal);
      this.slider.addEventListener("input", () => this.setStage(Number(this.slider.value)), { signal });
      this.theme.addEventListener("click", () => this.setTheme(this.dark() ? "light" : "dark"), { signal });
      this.map.addEventListener("click", (event) => this.jump(this.wordAt(event.offsetY / this.map.clientHeight)), {
        signal,
      });
      const scheme = matchMedia("(prefers-color-scheme: dark)");
      scheme.addEventListener("change", () => this.setTheme(""), { signal });
      addEventListener("resize", () => this.draw(), { signal });
      addEventListener("scroll", () => this.draw(), { signal, passive: true });
      addEventListener("keydown", (event) => event.key === "Escape" && this.clear(), { signal });
      this.setTheme("");
    }

    follow(reading, signal) {
      const { element } = reading;
      let heldBefore = false;
      const on = (kind, act) =>
        element.addEventListener(
          kind,
          (event) => {
            const i = reading.find(event.target);
            if (i >= 0) act(i, event);
          },
          { signal },
        );
      on("pointerover", (i) => (this.shown && this.shown.held) || this.show(reading, i));
      on("pointerdown", (i) => (heldBefore = this.isShown(reading, i) && this.shown.held));
      on("focusin", (i) => {
        reading.rove(i);
        this.show(reading, i);
      });
      on("click", (i) => this.hold(reading, i, !heldBefore));
      on("keydown", (i, event) => {
        const next = event.altKey || event.metaKey ? -1 : reading.after(event.key, i, event.ctrlKey);
        if (event.key === "Enter" || event.key === " ") this.hold(reading, i, !this.shown?.held);
        else if (next >= 0) reading.spans[next].focus();
        else return;
        event.preventDefault();
      });
    }

    dark() {
      const chosen = document.documentElement.dataset.theme;
      return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    }

    setTheme(name) {
      if (name) document.documentElement.dataset.theme = name;
      const dark = this.dark();
      this.theme.textContent = dark ? "Light" : "Dark";
      this.theme.setAttribute("aria-label", dark ? "Change to light colours" : "Change to dark colours");
      this.draw();
    }

    setStage(stage) {
      const { account, levels, source } = this,
        now = account.stages[stage];
      this.stage = stage;
      this.survival = account.survival(now);
      this.held = account.held(now);
      for (let i = 0; i < levels.length; i++) {
        let level = stage === 0 ? 1 : 0; // where all tokens are there, none stands out
        if (stage > 0) while (level < LEVELS.length && this.survival[i] >= LEVELS[level]) level++;
        if (level === levels[i]) continue;
        source.spans[i].classList.replace(`s${levels[i]}`, `s${level}`);
        levels[i] = level;
      }
      const text = stage === 0 ? `none yet: ${many(account.n, "token")}` : `after ${now.name}: ${many(now.k, "slot")}`;
      this.output.textContent = text;
      this.slider.setAttribute("aria-valuetext", text);
      this.legend.classList.toggle("whole", stage === 0);
      this.meaning.textContent = stage === 0 ? "Every token is still there." : "A word’s share of its slot:";
      if (this.shown) this.show(this.shown.reading, this.shown.i);
      else this.bars(null);
    }

    isShown(reading, i) {
      return this.shown !== null && this.shown.reading === reading && this.shown.i === i;
    }

    /* Look at one word until another is looked at. */
    show(reading, i) {
      const held = this.isShown(reading, i) && this.shown.held;
      this.unmark();
      this.shown = { reading, i, held };
      reading.spans[i].classList.add("current");
      if (held) this.press(reading.spans[i], held);
      if (reading === this.summary) this.describeWritten(i);
      else this.describeSource(i);
    }

    hold(reading, i, held) {
      this.show(reading, i);
      this.shown.held = held;
      this.press(reading.spans[i], held);
    }

    press(span, held) {
      span.classList.toggle("held", held);
      span.setAttribute("aria-pressed", String(held));
    }

    clear() {
      this.unmark();
      this.shown = null;
      this.describeNothing();
    }

    unmark() {
      for (const [span, mark] of this.marked) span.classList.remove(mark);
      this.marked = [];
      this.target?.classList.remove("target");
      if (!this.shown) return;
      const span = this.shown.reading.spans[this.shown.i];
      span.classList.remove("current", "held");
      span.removeAttribute("aria-pressed");
    }

    mark(reading, i, strength) {
      const mark = strength >= 0.5 ? "m3" : strength >= 0.2 ? "m2" : "m1";
      reading.spans[i].classList.add(mark);
      this.marked.push([reading.spans[i], mark]);
    }

    jump(i) {
      const span = this.source.spans[i];
      span.scrollIntoView({ block: "center", inline: "nearest" });
      this.source.rove(i);
      this.target?.classList.remove("target");
      this.target = span;
      span.classList.add("target");
    }

    wordAt(share) {
      const token = Math.min(Math.max(Math.floor(share * this.account.n), 0), this.account.n - 1);
      return this.account.wordOf[token];
    }

    /* ---- What is said of a word --------------------------------------------------------------------- */

    describeNothing() {
      this.detail.classList.add("idle");
      const hint = "Point at a word, or go to it with the arrow keys. A click or Enter holds it, Escape lets it go.";
      this.detail.replaceChildren(make("h2", {}, "Word"), make("p", { class: "quiet" }, hint));
      this.live.textContent = "";
      this.bars(null);
    }

    describe(reading, i, kind, facts, lists) {
      const close = make("button", { type: "button" }, "Close");
      close.addEventListener("click", () => this.clear());
      const name = make("p", { class: "word", dir: "auto" }, reading.name(i));
      this.detail.classList.remove("idle");
      this.detail.replaceChildren(make("h2", {}, kind, close), name, ...lists);
      this.live.textContent = `${reading.name(i)}: ${facts}`;
    }

    /* A list of source words with what each has, the largest filling its bar. */
    list(pairs) {
      const list = make("ol", { class: "mates" }),
        most = pairs.length ? pairs[0][1] : 1;
      for (const [i, share] of pairs.slice(0, LISTED)) {
        const bar = make("i");
        bar.style.setProperty("--v", share / most);
        const button = make("button", { type: "button" }, this.context(i));
        button.append(make("span", { class: "track" }, bar), make("span", { class: "figure" }, percent(share)));
        button.addEventListener("click", () => this.jump(i));
        list.append(make("li", {}, button));
      }
      return list;
    }

    /* A source word between its neighbours, so that one of many like it can be told. */
    context(i) {
      const near = (from, to) => {
        const words = [];
        for (let j = Math.max(from, 0); j < Math.min(to, this.source.size); j++) words.push(this.source.word(j).trim());
        return make("span", { class: "quiet" }, words.filter(Boolean).join(" "));
      };
      return make("span", { class: "name" }, near(i - 1, i), " ", this.source.name(i), " ", near(i + 1, i + 4));
    }

    describeWritten(i) {
      const drawn = this.account.drawn(i),
        top = largest(drawn, MARKED);
      for (const word of top) this.mark(this.source, word, drawn[word] / drawn[top[0]]);
      const total = top.reduce((sum, word) => sum + drawn[word], 0);
      const fact = `The ${many(top.length, "underlined word")} gave ${percent(total)} of what it drew on.`;
      const first = top
        .slice(0, 3)
        .map((word) => `${this.source.name(word)} ${percent(drawn[word])}`)
        .join(", ");
      const lists = [make("p", { class: "quiet figure" }, fact), this.list(top.map((word) => [word, drawn[word]]))];
      const said = this.describeCopied(i, lists);
      this.describe(this.summary, i, "Summary word", `${said}drew most on ${first}.`, lists);
      this.bars(drawn);
    }

    /* Put before the lists what was copied, where a model copies, and return it as a clause. */
    describeCopied(i, lists) {
      if (!this.account.copies) return "";
      const copied = this.account.copied(i),
        top = largest(copied, LISTED),
        share = percent(sum(copied)),
        whole = share === "100%";
      if (!top.length) {
        lists.unshift(make("p", { class: "quiet figure" }, "Written, not copied."));
        return "written, not copied; ";
      }
      const from = `copied from ${many(top.length, "place")}${top.length === LISTED ? " or more" : ""}`;
      const fact = whole ? `${capital(from)}.` : `${share} ${from}, the rest written.`;
      lists.unshift(make("p", { class: "quiet figure" }, fact));
      lists.splice(1, 0, this.list(top.slice(0, ORIGINS).map((word) => [word, copied[word]])));
      return whole ? "copied; " : `${share} copied; `;
    }

    describeSource(i) {
      const stage = this.account.stages[this.stage],
        slots = this.account.slots(i, stage);
      const lists = [],
        said = [];
      for (const one of slots.slice(0, 3)) {
        const others = [...one.others].sort((a, b) => b[1] - a[1]);
        const where = this.stage ? `slot ${count(one.slot + 1)} of ${count(stage.k)}` : "a slot of its own";
        const company = others.length ? `, with ${many(others.length, "other word")}` : "";
        said.push(`Holds ${percent(one.own)} of ${where}${company}.`);
        lists.push(make("p", { class: "quiet figure" }, said[said.length - 1]), this.list(others));
        others.slice(0, MARKED).forEach(([word, share]) => this.mark(this.source, word, share));
      }
      if (!slots.length) lists.push(make("p", { class: "quiet" }, (said[0] = `Dropped by ${stage.name}.`)));
      const drawers = this.account.drawers(i),
        top = largest(drawers, LISTED);
      for (const word of top) this.mark(this.summary, word, drawers[word] / drawers[top[0]]);
      this.describe(this.source, i, "Document word", said.join(" "), lists);
      this.bars(null);
    }

    /* ---- Bars and map ------------------------------------------------------------------------------- */

    bars(drawn) {
      if (!drawn && !this.drawn && this.barred === this.stage) return;
      this.barred = this.stage;
      const within = (values, { start, end }) => sum(values.subarray(start, end));
      const rows = this.sections.map((section) => [
        within(this.held, section),
        drawn ? within(drawn, section) : 0,
        section.size,
      ]);
      const most = Math.max(...rows.flat());
      this.sections.forEach((section, i) => {
        section.share.textContent = percent(rows[i][drawn ? 1 : 0]);
        section.held.style.setProperty("--v", rows[i][0] / most);
        section.drawn.style.setProperty("--v", rows[i][1] / most);
        section.part.style.setProperty("--v", rows[i][2] / most);
      });
      const word = drawn ? " Line and figure: what the word drew on it." : "";
      this.key.textContent = `Bar: its share of the slots. Tick: its share of the tokens.${word}`;
      this.drawn = drawn;
      this.draw();
    }

    /* Draw where in the document the memory comes from, and what the word in focus drew on. */
    draw() {
      if (this.drawing || !this.sections) return;
      this.drawing = requestAnimationFrame(() => {
        this.drawing = 0;
        this.paint();
      });
    }

    paint() {
      const { clientHeight: height, clientWidth: width } = this.map,
        scale = devicePixelRatio || 1;
      if (!height) return;
      const size = [Math.round(width * scale), Math.round(height * scale)];
      if (this.map.width !== size[0] || this.map.height !== size[1]) [this.map.width, this.map.height] = size;
      const pen = this.map.getContext("2d"),
        colours = getComputedStyle(this.map);
      pen.setTransform(scale, 0, 0, scale, 0, 0);
      pen.clearRect(0, 0, width, height);
      const [top, bottom] = [0, innerHeight].map((y) => (this.tokenAt(y) / this.account.n) * height);
      pen.fillStyle = colours.outlineColor;
      pen.fillRect(0, top, width, bottom - top);
      this.profile(pen, this.held, colours.color, width, height);
      if (this.drawn) this.profile(pen, this.drawn, colours.borderTopColor, width / 2, height);
    }

    /* Find the token at a height of the window, by its line: lines that were not seen yet have no height of their own. */
    tokenAt(y) {
      const lines = this.source.element.children;
      let low = 0,
        high = lines.length - 1;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (lines[middle].getBoundingClientRect().bottom > y) high = middle;
        else low = middle + 1;
      }
      const box = lines[low].getBoundingClientRect();
      const inside = Math.min(Math.max((y - box.top) / box.height, 0), 1);
      const [first, last] = [low, low + 1].map((line) => this.data.words.token[this.source.first[line]]);
      return first + inside * (last - first);
    }

    profile(pen, values, colour, width, height) {
      const bins = new Float64Array(Math.ceil(height / 3)),
        { token } = this.data.words;
      for (let i = 0; i < values.length; i++) bins[Math.floor((token[i] / this.account.n) * bins.length)] += values[i];
      const most = bins.reduce((a, b) => Math.max(a, b), 0);
      pen.fillStyle = colour;
      bins.forEach((value, i) => pen.fillRect(0, 3 * i, (width * value) / most, 2));
    }
  }

  let shown = null;

  /* Show an explanation in an element, in the place of what is there. */
  function mount(data, root = document.getElementById("explanation")) {
    shown?.ended.abort();
    shown = new Page(data, root);
    return shown;
  }

  const given = document.getElementById("explanation-data");
  if (given) mount(JSON.parse(given.textContent));
  return { mount };
})();
