"use strict";
// The text next to the timeline: stories, the tooltip and differences.
// Texts of a trace are inserted as text, never as markup.

const MAX_WAITS = 200;
const MANY = "the page has the stories of the first requests; batchdecode trace why has this one";

/** Returns a new element with attributes, listeners (onclick, say) and children. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Returns a button that looks like a link. */
const link = (onclick, ...content) =>
  element("button", { type: "button", class: "link", onclick }, ...content);

/** Returns the name of a request, isolated from the direction of the text around it. */
const nameOf = (label) => element("bdi", { class: "id", title: visible(label, 2000) }, visible(label, 60));

/** Returns the steps [start, end) in words. */
const stepsOf = (start, end) =>
  end - start === 1 ? `step ${counted(start)}` : `steps ${counted(start)}-${counted(end - 1)}`;

/** Returns a line of a story with links for its steps. */
function storyLine(text, goTo) {
  const parts = visible(text.trim(), 4000).split(/(\bsteps? [\d,]+(?:-[\d,]+)?)/);
  const made = parts.map((part, i) => {
    if (i % 2 === 0) return part;
    const [first, last = first] = part.match(/[\d,]+/g).map((number) => Number(number.replaceAll(",", "")));
    return link(() => goTo(first, last + 1), part);
  });
  return element("p", {}, element("bdi", {}, ...made));
}

/** Returns the story of a request, as printed by `batchdecode trace why`, and its waits. */
function storyOfRequest(run, sequence, goTo) {
  const { label, story, arrived, end } = run.sequences;
  const name = label[sequence];
  const [title, ...lines] = story[sequence];
  const waits = run.waitsOf(sequence);
  const rows = waits.slice(0, MAX_WAITS).map(({ start, end, why }) => {
    const when = link(() => goTo(start, end), stepsOf(start, end));
    return element("tr", {}, element("td", {}, when), element("td", {}, visible(why, 2000)));
  });
  const showAll = () => goTo(arrived[sequence], end[sequence]);
  const article = element(
    "article",
    { class: "story" },
    element("h3", {}, nameOf(name)),
    element("p", {}, title ? title.slice(name.length + 2) : MANY),
    ...lines.map((line) => storyLine(line, goTo)),
    element("button", { type: "button", onclick: showAll }, "Show all of it"),
  );
  if (rows.length)
    article.append(element("h4", {}, "What it waited for"), element("table", {}, ...rows));
  if (waits.length > MAX_WAITS)
    article.append(element("p", {}, `and ${counted(waits.length - MAX_WAITS)} more`));
  return article;
}

/** Returns the lines of the tooltip. */
function pointedText({ run, step, slot, span, lane }) {
  const when = `step ${counted(step)}` + (run.times ? ` (${counted(run.times.startOf(step))} s)` : "");
  if (lane) return [`${when}: ${LANES[lane]} ${counted(run.series[lane].at(step))}`];
  const place = `${when}, slot ${run.firstSlot + slot}`;
  if (span < 0) return [`${place}: empty`];
  const { spans, sequences, facts } = run;
  const sequence = spans.sequence[span];
  const start = spans.start[span];
  const outcome = facts.outcomes[spans.outcome[span]] || "unknown";
  const waited = start - sequences.arrived[sequence];
  return [
    visible(sequences.label[sequence], 60),
    `${place}: ${step < start + spans.prefill[span] ? "prefill" : "decode"}`,
    `${stepsOf(start, run.end(span))}, ended: ${outcome}`,
    spans.resumed[span] ? "resumed after a preemption" : `waited ${plural(waited, "step")} before`,
    ...(spans.cached[span] ? [`${plural(spans.cached[span], "token")} from the cache`] : []),
  ];
}

/** Returns how two runs differ, as printed by `batchdecode trace diff`, with links. */
function differences({ step, lines, changed }, goTo, choose) {
  const article = element("article", { class: "diff" });
  article.append(element("h3", {}, step === null ? "The schedules are equal" : "Where the runs part"));
  if (step !== null) {
    const show = () => goTo(step - 10, step + 30);
    article.append(element("button", { type: "button", onclick: show }, `Show step ${counted(step)}`));
  }
  article.append(element("pre", { tabindex: 0 }, lines.map((line) => visible(line, 2000)).join("\n")));
  if (changed.length) article.append(element("h4", {}, "Largest changes"));
  const items = changed.map((label) => element("li", {}, link(() => choose(label), nameOf(label))));
  article.append(element("ul", {}, ...items));
  return article;
}
