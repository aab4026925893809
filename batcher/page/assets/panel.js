"use strict";
// What is said beside the timeline: the story of a request, what lies under the pointer, and how
// two runs differ.  Texts of a trace go into the page as text alone, never as markup.

const MAX_PARTS = 200;

/** Returns a new element with attributes, listeners (onclick, say) and children. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Returns a row of a table, each of its cells from what is in it. */
const row = (...cells) => element("tr", {}, ...cells.map((content) => element("td", {}, ...content)));

/** Returns a table with titles of its columns, which scrolls if it is too wide. */
function tableOf(titles, rows) {
  const heads = titles.map((title) => element("th", { scope: "col" }, title));
  return element("div", { class: "scrolls" }, element("table", {}, element("tr", {}, ...heads), ...rows));
}

/** Returns what a request is called, so that its letters do not turn those around it. */
const nameOf = (label) => element("bdi", { class: "id", title: visible(label, 2000) }, visible(label, 60));

/** Returns the steps [start, end) in words. */
const stepsOf = (start, end) =>
  end - start === 1 ? `step ${counted(start)}` : `steps ${counted(start)}–${counted(end - 1)}`;

/** Returns a time in words, to follow a step; nothing where it is but the number of steps. */
function timeOf(story, steps, time) {
  if (story.is_timed) return ` (${decimal(time)} s)`;
  return time === steps ? "" : ` (time ${decimal(time)})`;
}

const plural = (number, what) => `${decimal(number)} ${what}${number === 1 ? "" : "s"}`;

/** Returns all that is to say of a request: a heading, what it asked for, its parts and its spans. */
function storyOfRequest(page, run, sequence, goTo) {
  const id = run.sequences.id.at(sequence);
  const answer = answerOf(run, id);
  const index = run.sequences.index[sequence];
  const story =
    answer.stories.find((one) => one.index === index && isOf(run, sequence, one)) ?? storyOf(run, sequence);
  const { arrived, ended } = story;
  return element(
    "article",
    { class: "story" },
    element("h3", {}, nameOf(story.label)),
    element(
      "p",
      {},
      arrived
        ? `asked for at most ${plural(arrived.max_tokens, "token")} ` +
            `after ${plural(arrived.prompt_tokens, "prompt token")}; ` +
            `arrived in step ${counted(arrived.step)}${timeOf(story, arrived.step, arrived.time)}`
        : "nothing tells of its arrival",
    ),
    element(
      "p",
      {},
      ended?.reason === "lost"
        ? `lost with the worker, which died, ${plural(ended.tokens, "token")}: decoded again from the beginning`
        : ended
        ? `ended with step ${counted(ended.step)}${timeOf(story, ended.step + 1, ended.time)}: ` +
            `${ended.reason}${ended.limit ? ` (${ended.limit})` : ""}, ${plural(ended.tokens, "token")}`
        : "the trace breaks off before its end",
    ),
    ended?.error ? reasonOfFailure(ended.error) : null,
    totalsBar(story),
    element(
      "button",
      {
        type: "button",
        onclick: () =>
          goTo(arrived?.step ?? story.spans[0]?.start ?? 0, ended ? ended.step + 1 : run.numSteps),
      },
      "Show all of it",
    ),
    element("h4", {}, "What it waited for, and what its steps were for"),
    partsTable(page, story, goTo),
    ...(story.spans.length ? [element("h4", {}, "Slots it held"), spansTable(page, run, story, goTo)] : []),
    element(
      "details",
      {},
      element("summary", {}, "All of it as JSON"),
      element("pre", {}, visibleJson(answer)),
    ),
  );
}

/** Returns why a request failed, so that its letters do not turn those around it. */
const reasonOfFailure = ({ code, message }) =>
  element("p", {}, `${code}: `, element("bdi", {}, visible(message, 2000)));

const isOf = (run, sequence, story) =>
  !story.arrived || story.arrived.step === run.sequences.arrived[sequence];

/** Returns an answer as JSON in which what is not visible, or turns text, is escaped. */
function visibleJson(answer) {
  const escaped = (one) =>
    one.replace(/[^]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return JSON.stringify(answer, null, 1).replace(/(?!\n)[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, escaped);
}

const PHASES = {
  wait: "waiting",
  preempted: "preempted",
  prefill: "prefill",
  decode: "decode",
  standstill: "standing still",
};

/** Returns the sums of a story as a bar, with its numbers beside it in words. */
function totalsBar(story) {
  const total = Object.values(story.steps).reduce((sum, steps) => sum + steps, 0);
  if (!total) return null;
  const kinds = Object.keys(PHASES).filter((phase) => story.steps[phase]);
  const bar = element("div", { class: "bar", "aria-hidden": "true" });
  for (const phase of kinds) {
    const piece = bar.appendChild(element("span", { class: `is-${phase}` }));
    piece.style.flexGrow = story.steps[phase];
  }
  const told = kinds.map((phase) => {
    const seconds = timeOf(story, story.steps[phase], story.seconds[phase]);
    return `${plural(story.steps[phase], "step")} ${PHASES[phase]}${seconds}`;
  });
  return element("div", {}, bar, element("p", {}, told.join(" · ")));
}

function partsTable(page, story, goTo) {
  const rows = story.parts.slice(0, MAX_PARTS).map((part) => {
    const howLong = plural(part.end - part.start, "step");
    return row([stepLink(part.start, part.end, goTo)], [howLong], [part.phase], reasonOf(page, part));
  });
  return tableOf(["when", "how long", "what", "why"], [...rows, ...restOf(story.parts, 4)]);
}

/** Returns why a part went as it did, in the words that `batchdecode trace why` has. */
function reasonOf(page, part) {
  if (!part.cause) return [part.phase === "prefill" ? "computed what it began with" : "generated"];
  const why = [page.words[part.phase === "wait" ? "waits" : "standstills"][part.cause] ?? part.cause];
  if (part.behind) why.push(", behind ", nameOf(part.behind));
  if (part.blocks) why.push(`, ${plural(part.blocks, "block")} needed`);
  if (part.num_passed) why.push(`; ${plural(part.num_passed, "other")} went before it`);
  if (part.by?.length) {
    const names = part.by.slice(0, 8).flatMap((label, i) => (i ? [", ", nameOf(label)] : [nameOf(label)]));
    why.push("; slots held by ", ...names, part.by.length > 8 ? ` and ${part.by.length - 8} more` : "");
  }
  return why;
}

/** Returns a row that says how many are not shown, if any. */
function restOf(all, columns) {
  const more = all.length - MAX_PARTS;
  if (more <= 0) return [];
  return [
    element("tr", {}, element("td", { colspan: columns }, `and ${counted(more)} more, in the JSON below`)),
  ];
}

function spansTable(page, run, story, goTo) {
  const rows = story.spans.slice(0, MAX_PARTS).map((span) => {
    const more = [];
    const detail = run.spanAt(span.slot, span.start);
    const { chunks } = moreOf(run.spans, detail);
    if (span.aging !== undefined) {
      const since = story.is_timed ? `${decimal(span.aging)} s` : plural(span.aging, "step");
      more.push(`first by --aging, whatever the policy: it had arrived ${since} before, or more`);
    }
    if (span.cached) more.push(foundText(story, span));
    if (span.generated) more.push(`began with ${plural(span.generated, "generated token")}`);
    if (chunks) {
      const steps = `${chunks.length === 1 ? "step" : "steps"} ${chunks.slice(0, 12).map(counted).join(", ")}`;
      more.push(`prefill in chunks, the later ones in ${steps}${chunks.length > 12 ? " …" : ""}`);
    }
    if (span.drafts)
      more.push(`${counted(span.drafts.accepted)} of ${plural(span.drafts.drafted, "draft")} accepted`);
    if (span.retries) more.push(`asked again ${plural(span.retries.length, "time")}`);
    const lost = span.preemption;
    if (lost)
      more.push([
        "preempted for ",
        nameOf(labelOf(lost.for_id, lost.for_index, "sample")),
        `, ${page.words.preemptions[lost.reason]}: ${plural(lost.tokens, "token")} to compute again`,
      ]);
    const said = more.flatMap((part, i) => (i ? ["; ", part] : [part])).flat();
    const first = span.first_token === null ? "none" : `step ${counted(span.first_token)}`;
    return row([String(run.firstSlot + span.slot)], [stepLink(span.start, span.end, goTo)], [first], said);
  });
  const titles = ["slot", "when", "first token", "what happened"];
  return tableOf(titles, [...rows, ...restOf(story.spans, 4)]);
}

/** Returns how many tokens a span found in the cache, and whose. */
function foundText(story, span) {
  const found = `${plural(span.cached, "token")} found in the cache`;
  if (!span.cached_from) return [found];
  const { id, index, role = "sample" } = span.cached_from;
  const label = labelOf(id, index, role);
  return label === story.label ? [`${found}, its own`] : [`${found}, from `, nameOf(label)];
}

const stepLink = (start, end, goTo) =>
  element("button", { type: "button", class: "link", onclick: () => goTo(start, end) }, stepsOf(start, end));

/** Returns what is said of what lies under the pointer, as lines. */
function pointedText(pointed, view) {
  const { run, step, slot, span, lane } = pointed;
  const when = run.hasTimes
    ? `step ${counted(step)} (${decimal(run.times.startOf(step))} s)`
    : `step ${counted(step)}`;
  if (lane) return [`${when}: ${LANES[lane]} ${counted(run.series[lane].at(step))}`];
  const place = `${when}, slot ${run.firstSlot + slot}`;
  if (span < 0) return [`${place}: empty`];
  const { spans } = run;
  const sequence = spans.sequence[span];
  const first = firstToken(run, span);
  const phase = first === null || step <= first ? "prefill" : "decode";
  const outcome = run.facts.outcomes[spans.outcome[span]] || "not told";
  const lines = [
    visible(run.label(sequence), 60),
    `${place}: ${phase}`,
    `${stepsOf(spans.start[span], run.end(span))}, ended: ${outcome}`,
  ];
  const waited = spans.start[span] - run.sequences.arrived[sequence];
  if (!(spans.flags[span] & RESUMED) && !Number.isNaN(run.sequences.time[sequence]))
    lines.push(`waited ${plural(waited, "step")} before`);
  if (spans.flags[span] & RESUMED) lines.push("resumed after a preemption");
  if (spans.cached[span]) lines.push(`${plural(spans.cached[span], "token")} from the cache`);
  return lines;
}

/** Returns how two runs differ, as `batchdecode trace diff` says it, and whom to look at. */
function differences(diff, goTo, choose) {
  return element(
    "article",
    { class: "diff" },
    element("h3", {}, diff.step === null ? "The schedules are equal" : "Where the runs part"),
    diff.step === null
      ? null
      : element(
          "button",
          { type: "button", onclick: () => goTo(diff.step - 10, diff.step + 30) },
          `Show step ${counted(diff.step)}`,
        ),
    element("pre", { tabindex: 0 }, diff.lines.map((line) => visible(line, 2000)).join("\n")),
    diff.changed.length ? element("h4", {}, "Those that changed most") : null,
    element(
      "ul",
      {},
      ...diff.changed.map(({ id, index }) =>
        element(
          "li",
          {},
          element(
            "button",
            { type: "button", class: "link", onclick: () => choose(id, index) },
            nameOf(labelOf(id, index, "sample")),
          ),
        ),
      ),
    ),
  );
}
