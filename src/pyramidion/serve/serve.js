/* Send a document, show how far it is and what is written, then mount the view of its explanation.
 *
 * What a text holds goes into text nodes and into the values of fields, never into markup.
 */
"use strict";

(() => {
  const $ = (id) => document.getElementById(id);
  const NUMBERS = ["num_beams", "min_new_tokens", "max_new_tokens"];
  const count = (number) => number.toLocaleString("en");
  const many = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
  const megabytes = (bytes) => `${(bytes / 1e6).toLocaleString("en", { maximumFractionDigits: 1 })} MB`;
  const UNREACHED = "The server cannot be reached. Is it still running?";

  let card = null, // what /api/model says
    running = null, // how to end what is under way
    named = "", // the file that the text is from
    done = null; // the last result

  /* ---- Small things ------------------------------------------------------------------------------- */

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children); // a string becomes a text node
    return element;
  }

  /* Say what is wrong, with a field by the name that it has here. */
  function problem(text) {
    const named = (all, id) => ([...NUMBERS, "title"].includes(id) ? `“${$(id).labels[0].textContent}”` : all);
    $("problem").textContent = text.replace(/`(\w+)`/g, named);
  }

  /* Say what is being done: the numbers for the eye, the stage also aloud, once. */
  function state(stage, detail = "") {
    $("state").textContent = stage + (stage && detail ? ` · ${detail}` : detail);
    if ($("live").dataset.said !== stage) $("live").textContent = $("live").dataset.said = stage;
  }

  async function ask(path, options) {
    let response;
    try {
      response = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error(UNREACHED);
    }
    if (response.ok) return response;
    const told = await response.json().catch(() => ({}));
    const wait = response.headers.get("Retry-After");
    throw new Error((told.error || `The server answered ${response.status}.`) + (wait ? ` Try again in ${wait} s.` : ""));
  }

  /* Change how the page is while something is under way. */
  function busy(control) {
    running = control;
    $("start").disabled = control !== null;
    $("cancel").hidden = $("progress").hidden = control === null;
    $("progress").value = 0;
    $("composer").classList.toggle("busy", control !== null);
    for (const id of ["text", "file", "title", "explain", ...NUMBERS]) $(id).disabled = control !== null;
  }

  /* Do something that can be cancelled, and say what goes wrong. */
  async function attempt(work) {
    if (running) return;
    const control = new AbortController(),
      options = document.querySelector(".options"),
      { open: opened } = options;
    busy(control);
    options.open = false;
    problem("");
    try {
      await work(control.signal);
    } catch (error) {
      $("draft").hidden = true;
      state(error.name === "AbortError" ? "Cancelled." : "");
      if (error.name !== "AbortError") problem(error.message);
    } finally {
      busy(null);
      options.open = opened;
    }
  }

  /* ---- The document ------------------------------------------------------------------------------- */

  function measure() {
    const words = $("text").value.match(/\S+/gu)?.length ?? 0;
    $("count").textContent = words ? many(words, "word") : "";
  }

  function fill(text, name) {
    $("text").value = text;
    $("text").scrollTop = 0;
    $("title").value = named = name.slice(0, 300);
    measure();
    state(`Read ${name}.`);
  }

  async function decoded(file) {
    const bytes = new Uint8Array(await file.arrayBuffer());
    const mark = bytes[0] === 0xff && bytes[1] === 0xfe ? "utf-16le" : bytes[0] === 0xfe && bytes[1] === 0xff ? "utf-16be" : "utf-8";
    try {
      return new TextDecoder(mark, { fatal: true }).decode(bytes);
    } catch {
      throw new Error(`${file.name} must be a text in UTF-8, or a PDF.`);
    }
  }

  function open(file) {
    return attempt(async (signal) => {
      const isPdf = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
      const most = card ? card.limits[isPdf ? "pdf_bytes" : "body_bytes"] : Infinity;
      if (file.size > most) throw new Error(`${file.name} must have at most ${megabytes(most)}, got ${megabytes(file.size)}.`);
      state("Reading the file…");
      if (!isPdf) return fill(await decoded(file), file.name);
      const response = await ask("/api/texts", {
        method: "POST",
        headers: { "Content-Type": "application/pdf" },
        body: file,
        signal,
      });
      fill((await response.json()).text, file.name);
    });
  }

  /* ---- The summary -------------------------------------------------------------------------------- */

  function request() {
    const body = { text: $("text").value, explain: $("explain").checked };
    if (!body.text.trim()) throw new Error("There must be a text to summarise.");
    if ($("title").value.trim()) body.title = $("title").value.trim();
    for (const id of NUMBERS) {
      if ($(id).validity.badInput) throw new Error(`“${$(id).labels[0].textContent}” must be a whole number.`);
      if ($(id).value !== "") body[id] = Number($(id).value);
    }
    body.text = body.text.toWellFormed?.() ?? body.text;
    const sent = JSON.stringify(body),
      size = new Blob([sent]).size;
    if (card && size > card.limits.body_bytes)
      throw new Error(`A text must have at most ${megabytes(card.limits.body_bytes)}, got ${megabytes(size)}.`);
    return sent;
  }

  async function* lines(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = [];
    for (;;) {
      const { done: over, value } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new Error(UNREACHED);
      });
      if (over) break;
      const parts = value.split("\n");
      rest.push(parts[0]);
      for (const part of parts.slice(1)) {
        yield JSON.parse(rest.join(""));
        rest = [part];
      }
    }
  }

  function show(event) {
    if (event.stage === "queued") state("Waiting", event.ahead ? `${many(event.ahead, "request")} before this one` : "");
    if (event.stage === "reading") state("Reading");
    if (event.stage === "encoding") state("Reading", many(event.tokens, "token"));
    if (event.stage === "explaining") state("Looking at what was kept");
    if (event.stage !== "writing") return;
    const most = Number($("max_new_tokens").value) || card?.decoding.max_new_tokens;
    state("Writing", many(event.tokens, "token") + (most ? ` of at most ${count(most)}` : ""));
    if (most) $("progress").value = Math.min(event.tokens / most, 1);
    $("draft").hidden = false;
    $("written").textContent = event.text;
  }

  function summarise() {
    return attempt(async (signal) => {
      const body = request();
      $("text").scrollTop = 0;
      state("Sending");
      const headers = { "Content-Type": "application/json" };
      const response = await ask("/api/summaries/stream", { method: "POST", headers, body, signal });
      let last = null;
      for await (const event of lines(response)) show((last = event));
      if (last?.stage === "failed") throw new Error(last.error);
      if (last?.stage !== "done") throw new Error(UNREACHED);
      finish(last.result);
    });
  }

  function finish(result) {
    done = result;
    $("draft").hidden = true;
    $("composer").hidden = true;
    $("result").hidden = false;
    $("download").hidden = !result.explanation;
    $("took").textContent = `${result.seconds.toFixed(1)} s`;
    if (result.explanation) pyramidion.mount(result.explanation, $("explanation"));
    else $("explanation").replaceChildren(plain(result));
    const heading = $("explanation").querySelector("h1");
    document.title = `${heading.textContent} · Pyramidion`;
    heading.tabIndex = -1;
    heading.focus({ preventScroll: true });
    scrollTo(0, 0);
    state("Done.");
  }

  /* A summary without an explanation. */
  function plain(result) {
    const facts = `${many(result.document_tokens, "token")} · model ${card?.name ?? ""}`;
    const head = make("header", { class: "head" }, make("h1", {}, $("title").value.trim() || "Summary"));
    head.append(make("p", { class: "figure quiet" }, facts));
    if (result.note) head.append(make("p", { class: "quiet" }, `${result.note[0].toUpperCase()}${result.note.slice(1)}.`));
    const text = make("p", { class: "reading", dir: "auto" }, result.summary || "(Nothing was written.)");
    return make("main", { class: "sheet" }, head, make("div", { class: "only" }, text));
  }

  /* ---- What is done with it ----------------------------------------------------------------------- */

  function again() {
    $("result").hidden = true;
    $("explanation").replaceChildren();
    $("composer").hidden = false;
    document.title = "Pyramidion";
    done = null;
    state("");
    $("text").focus();
    $("text").select();
    $("text").scrollTop = 0;
  }

  async function download() {
    const pieces = await (await ask("/page.json")).json();
    const escaped = (text, signs) => text.replace(signs, (sign) => `&#${sign.codePointAt(0)};`);
    const title = escaped(done.explanation.title.replace(/\p{C}/gu, " "), /[&<>"']/g);
    const unsafe = /[<>&'\u2028\u2029]/g; // as a template would write JSON into a page
    const data = JSON.stringify(done.explanation).replace(unsafe, (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`);
    save(pieces.before + title + pieces.between + data + pieces.after, `${name()}.explained.html`);
  }

  function name() {
    const found = done.explanation.title.replace(/\.\w{1,5}$/, "").replace(/[^\p{L}\p{N}]+/gu, "-");
    return found.replace(/^-+|-+$/g, "").slice(0, 60) || "document";
  }

  function save(text, file) {
    const address = URL.createObjectURL(new Blob([text], { type: "text/html" }));
    const link = make("a", { href: address, download: file });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }

  async function copy() {
    const took = $("took").textContent;
    const said = await navigator.clipboard.writeText(done.summary).then(
      () => "Copied.",
      () => "The browser does not let the page copy.",
    );
    $("took").textContent = $("live").textContent = said;
    setTimeout(() => $("took").textContent === said && ($("took").textContent = took), 2000);
  }

  /* ---- What happens ------------------------------------------------------------------------------- */

  function describe() {
    const { decoding, limits } = card;
    for (const id of NUMBERS) $(id).placeholder = decoding[id] ?? "";
    $("num_beams").max = limits.num_beams;
    $("min_new_tokens").max = $("max_new_tokens").max = limits.max_new_tokens;
    const size = card.parameters >= 1e6 ? `${(card.parameters / 1e6).toFixed(1)} M` : count(card.parameters);
    $("model").textContent = `Model ${card.name} · ${size} parameters · for ${count(card.trained_length)} tokens · ${card.device}`;
    const pdf = card.pdf ? `, or PDF up to ${megabytes(limits.pdf_bytes)}` : "";
    $("kinds").textContent = `Text up to ${megabytes(limits.body_bytes)}${pdf}`;
    $("file").accept = `.txt,.md,text/*${card.pdf ? ",.pdf,application/pdf" : ""}`;
  }

  const onDrop = (kind, act) =>
    addEventListener(kind, (event) => {
      if (![...(event.dataTransfer?.types ?? [])].includes("Files") || $("composer").hidden) return;
      event.preventDefault();
      act(event);
    });

  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    summarise();
  });
  $("text").addEventListener("input", () => {
    if ($("title").value === named) $("title").value = named = ""; // it is no longer that file
    measure();
  });
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
  });
  $("cancel").addEventListener("click", () => running?.abort());
  $("file").addEventListener("change", () => {
    const [file] = $("file").files;
    $("file").value = "";
    if (file) open(file);
  });
  onDrop("dragover", () => $("drop").classList.add("over"));
  onDrop("dragleave", (event) => event.relatedTarget || $("drop").classList.remove("over"));
  onDrop("drop", (event) => {
    $("drop").classList.remove("over");
    if (event.dataTransfer.files.length) open(event.dataTransfer.files[0]);
  });
  $("again").addEventListener("click", again);
  $("copy").addEventListener("click", copy);
  $("download").addEventListener("click", () => download().catch((error) => ($("took").textContent = error.message)));
  addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());

  ask("/api/model")
    .then((response) => response.json())
    .then((told) => {
      card = told;
      describe();
    })
    .catch((error) => problem(error.message));
  measure();
})();
