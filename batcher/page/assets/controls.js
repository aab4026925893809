"use strict";
// The controls above the timeline: find, filter, zoom, the scale of time, light and dark, help.

const MAX_HITS = 1000;
const SHOWN_HITS = 8;

const KEYS = [
  ["← →", "move in time (with Shift: the span before or after in this slot)"],
  ["↑ ↓", "the span in the slot above or below"],
  ["+ −", "zoom in, zoom out"],
  ["Home End", "to the first step, to the last"],
  ["0", "the whole run"],
  ["Enter", "the story of the chosen request"],
  ["/ or F", "find a request; Enter goes on to the next one"],
  ["N P", "the next one that was found, the one before"],
  ["[ ]", "lower rows, higher rows; Page Up and Page Down scroll them"],
  ["S", "steps or seconds, where the trace tells times"],
  ["T", "light or dark"],
  ["Esc", "choose nothing, close this"],
  ["wheel, pinch", "zoom (with Shift, or sideways: move; with Alt: scroll slots)"],
  ["drag", "move in time, and scroll slots"],
];

class Controls {
  constructor(page, view) {
    this.page = page;
    this.view = view;
    this.hits = [];
    this.hit = -1;
    const option = (value, text = value) => element("option", { value }, text);
    const outcomes = view.runs[0].facts.outcomes.filter((name) => name);
    const filters = { onchange: () => this.applyFilter() };
    this.find = element("input", {
      type: "search",
      id: "find",
      placeholder: "part of an id",
      autocomplete: "off",
      spellcheck: "false",
      oninput: () => this.search(),
      onkeydown: (event) => this.onFindKey(event),
    });
    this.only = element("input", { type: "checkbox", id: "only", ...filters });
    this.outcome = element(
      "select",
      { id: "outcome", ...filters },
      option("", "every outcome"),
      ...outcomes.map((name) => option(name)),
    );
    const states = {
      "": "every state",
      prefill: "prefill",
      decode: "decode",
      waiting: "had to wait",
      preempted: "preempted",
    };
    this.state = element(
      "select",
      { id: "state", ...filters },
      ...Object.entries(states).map(([value, text]) => option(value, text)),
    );
    this.found = element("ol", { class: "hits", "aria-label": "Requests found" });
    this.status = element("p", { class: "status", role: "status", "aria-live": "polite" });
    const button = (text, label, onclick, more = {}) =>
      element("button", { type: "button", title: label, "aria-label": label, onclick, ...more }, text);
    this.scale = button("Steps", "Time in steps or in seconds (S)", () => page.switchScale(), {
      id: "scale",
      disabled: !view.canBeTimed,
    });
    this.help = this.helpPanel();
    this.element = element(
      "div",
      { class: "controls", role: "toolbar", "aria-label": "Timeline" },
      element(
        "span",
        { class: "group" },
        element("label", { for: "find" }, "Find "),
        this.find,
        element("label", {}, this.only, " only these"),
      ),
      element(
        "span",
        { class: "group" },
        element("label", { for: "outcome", class: "hidden" }, "Outcome"),
        this.outcome,
        element("label", { for: "state", class: "hidden" }, "State"),
        this.state,
        button("Clear", "No filter", () => this.clear(), { id: "clear" }),
      ),
      element(
        "span",
        { class: "group" },
        button("−", "Zoom out (−)", () => page.zoomBy(1 / 2)),
        button("+", "Zoom in (+)", () => page.zoomBy(2)),
        button("All", "The whole run (0)", () => page.showAll()),
        this.scale,
        button("◐", "Light or dark (T)", () => page.switchTheme(), { id: "theme" }),
        button("?", "Keys and help (?)", () => this.help.showModal(), { id: "help" }),
      ),
      this.help,
    );
  }

  helpPanel() {
    const rows = KEYS.map(([keys, what]) =>
      element("tr", {}, element("th", { scope: "row" }, keys), element("td", {}, what)),
    );
    const legend = [
      ["decode", "decode: a colour for each request; only its neighbours need to differ"],
      ["prefill", "prefill, hatched: up to the step of the first token"],
      ["dim", "what the filter leaves out"],
      ["mark", "◂ preempted, ✕ failed; where many spans fall into a pixel, tinted like this"],
    ];
    return element(
      "dialog",
      { class: "help", "aria-label": "Keys and help" },
      element("h2", {}, "Keys"),
      element("table", {}, ...rows),
      element("h2", {}, "What is drawn"),
      element(
        "ul",
        {},
        ...legend.map(([name, text]) =>
          element("li", {}, element("span", { class: `swatch is-${name}`, "aria-hidden": "true" }), text),
        ),
      ),
      element(
        "p",
        {},
        "Rows are slots. In the lanes below them, the darker area is the mean of the steps in a pixel, " +
          "the lighter one their highest. What a hover or a click says of a request is what " +
          "batchdecode trace why tells of it.",
      ),
      element("form", { method: "dialog" }, element("button", {}, "Close")),
    );
  }

  /** Finds requests by a part of their ids; of two runs to compare, in the first that has any. */
  search() {
    const text = this.find.value;
    this.hits = [];
    this.hit = -1;
    let isMore = false;
    for (const run of this.view.runs) {
      if (!text || !run.sequences.id) continue;
      for (const sequence of run.sequences.id.search(text)) {
        if (this.hits.length === MAX_HITS) {
          isMore = true;
          break;
        }
        if (!run.isFollower(sequence)) this.hits.push({ run, sequence });
      }
      if (this.hits.length && this.page.facts.diff) break;
    }
    this.listHits(isMore);
    if (this.only.checked) this.applyFilter();
  }

  listHits(isMore) {
    const items = this.hits
      .slice(0, SHOWN_HITS)
      .map(({ run, sequence }, number) =>
        element(
          "li",
          {},
          element(
            "button",
            { type: "button", class: "link", onclick: () => this.goTo(number) },
            nameOf(run.label(sequence)),
          ),
        ),
      );
    this.found.replaceChildren(...items);
    const number = `${counted(this.hits.length)}${isMore ? " or more" : ""}`;
    if (this.find.value)
      this.say(this.hits.length ? `${number} found` : (this.rejected() ?? "no request has that in its id"));
  }

  /** Returns what is to say of lines that were no requests, if one has this id. */
  rejected() {
    for (const { rejects } of this.view.runs)
      for (const number of rejects.id?.search(this.find.value) ?? []) {
        const { reason } = JSON.parse(rejects.event.at(number));
        return `${visible(rejects.id.at(number), 60)}: no valid request (${reason})`;
      }
    return null;
  }

  goTo(number) {
    const { length } = this.hits;
    if (!length) return;
    this.hit = (number + length) % length;
    const { run, sequence } = this.hits[this.hit];
    this.page.choose(run, sequence);
    this.say(`${counted(this.hit + 1)} of ${counted(length)}: ${visible(run.label(sequence), 60)}`);
  }

  onFindKey(event) {
    if (event.key === "Enter") this.goTo(this.hit + (event.shiftKey ? -1 : 1));
    else if (event.key === "Escape") this.page.charts[0].canvas.focus();
    else return;
    event.preventDefault();
  }

  applyFilter(opening = {}) {
    const text = this.only.checked ? this.find.value : "";
    this.view.setFilter({
      ...NO_FILTER,
      text,
      outcome: this.outcome.value,
      state: this.state.value,
      ...opening,
    });
    const { runs, filtered } = this.view;
    const number = this.page.facts.diff ? 1 : runs.length; // of two to compare, the first is counted
    const shown = d3.sum(filtered.slice(0, number), (of) => of.number);
    const total = d3.sum(runs.slice(0, number), (run) => run.spans.rows);
    this.say(filtered[0].isAll ? "" : `${counted(shown)} of ${plural(total, "span")} shown`);
  }

  clear() {
    this.only.checked = false;
    this.outcome.value = this.state.value = "";
    this.applyFilter();
  }

  say(text) {
    this.status.textContent = text;
  }
}
