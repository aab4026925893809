"use strict";
// The controls above the timeline.

const MAX_HITS = 1000;
const SHOWN_HITS = 8;

const KEYS = [
  ["← →", "move in time (with Shift: select the span before or after in this slot)"],
  ["↑ ↓", "select a span in the slot above or below"],
  ["+ −", "zoom in, zoom out"],
  ["Home End", "go to the first or last step"],
  ["0", "show the whole run"],
  ["Enter", "go to the story of the selected request"],
  ["/ or F", "find a request; Enter goes to the next one"],
  ["N P", "go to the next or previous request found"],
  ["[ ]", "lower or raise rows; Page Up and Page Down scroll them"],
  ["S", "switch between steps and seconds, if the trace has times"],
  ["T", "switch between light and dark"],
  ["Esc", "clear the selection, close this list"],
  ["wheel, pinch", "zoom (with Shift, or sideways: move; with Alt: scroll slots)"],
  ["drag, click", "move in time and scroll slots, select a request"],
];
const LEGEND = [
  ["prefill", "", "prefill"],
  ["decode", "", "decode (colours only separate requests)"],
  ["mark", "◂", "preempted"],
  ["mark", "✕", "failed"],
  ["chosen", "", "selected"],
  ["dim", "", "filtered out"],
  ["most", "", "lanes: mean, and maximum in a lighter shade"],
];
const STATES = {
  "": "every state",
  prefill: "prefill",
  decode: "decode",
  waiting: "had to wait",
  preempted: "preempted",
};

class Controls {
  constructor(page, view) {
    this.page = page;
    this.view = view;
    this.hits = []; // see search
    const filters = { onchange: () => this.applyFilter() };
    const field = { type: "search", id: "find", autocomplete: "off", spellcheck: "false" };
    const typing = { oninput: () => this.search(), onkeydown: (event) => this.onFindKey(event) };
    this.find = element("input", { placeholder: "part of an id", ...field, ...typing });
    this.only = element("input", { type: "checkbox", id: "only", ...filters });
    const select = (id, label, texts) => {
      const options = Object.entries(texts).map(([value, text]) => element("option", { value }, text));
      return element("select", { id, "aria-label": label, ...filters }, ...options);
    };
    const outcomes = view.runs[0].facts.outcomes.map((name) => [name, name || "every outcome"]);
    this.outcome = select("outcome", "Outcome", Object.fromEntries(outcomes));
    this.state = select("state", "State", STATES);
    this.found = element("ol", { class: "hits", "aria-label": "Requests found" });
    this.status = element("p", { class: "status", role: "status", "aria-live": "polite" });
    const button = (text, label, onclick, more = {}) =>
      element("button", { type: "button", title: label, "aria-label": label, onclick, ...more }, text);
    const timed = { id: "scale", disabled: !view.canBeTimed };
    this.scale = button("Steps", "Time in steps or in seconds (S)", () => page.switchScale(), timed);
    this.help = this.helpPanel();
    const signs = LEGEND.map(([kind, sign, text]) =>
      element("li", {}, element("span", { class: `swatch is-${kind}`, "aria-hidden": "true" }, sign), text),
    );
    this.legend = element("ul", { class: "legend", "aria-label": "Legend" }, ...signs);
    const group = (...parts) => element("span", { class: "group" }, ...parts);
    this.element = element(
      "div",
      { class: "controls", role: "toolbar", "aria-label": "Timeline" },
      group(
        element("label", { for: "find" }, "Find "),
        this.find,
        element("label", {}, this.only, " only these"),
      ),
      group(this.outcome, this.state, button("Clear", "No filter", () => this.clear(), { id: "clear" })),
      group(
        button("−", "Zoom out (−)", () => page.zoomBy(1 / 2)),
        button("+", "Zoom in (+)", () => page.zoomBy(2)),
        button("All", "The whole run (0)", () => page.zoom.transform(page.area, d3.zoomIdentity)),
        this.scale,
        button("◐", "Light or dark (T)", () => page.switchTheme(), { id: "theme" }),
        button("?", "Keys (?)", () => this.help.showModal(), { id: "help" }),
      ),
      this.help,
    );
  }

  helpPanel() {
    const rows = KEYS.map(([keys, what]) =>
      element("tr", {}, element("th", { scope: "row" }, keys), element("td", {}, what)),
    );
    const note =
      "Rows are slots, and time runs to the right. A story is the output of batchdecode trace why. " +
      "Where many spans share a pixel, their colours mix, and red marks a failure or preemption.";
    return element(
      "dialog",
      { class: "help", "aria-label": "Keys" },
      element("h2", {}, "Keys"),
      element("table", {}, ...rows),
      element("p", {}, note),
      element("form", { method: "dialog" }, element("button", {}, "Close")),
    );
  }

  /** Finds requests by a part of their ids; of two compared runs, in the first with any. */
  search() {
    const text = this.find.value;
    this.hits = [];
    this.hit = -1;
    for (const run of text ? this.view.runs : []) {
      const { id, leader } = run.sequences;
      for (let sequence = 0; sequence < id.length && this.hits.length <= MAX_HITS; sequence++)
        if (id[sequence].includes(text) && leader[sequence] === sequence) this.hits.push({ run, sequence });
      if (this.hits.length && this.page.facts.diff) break;
    }
    const isMore = this.hits.length > MAX_HITS;
    if (isMore) this.hits.pop();
    const items = this.hits
      .slice(0, SHOWN_HITS)
      .map(({ run, sequence }, number) =>
        element("li", {}, link(() => this.goTo(number), nameOf(run.sequences.label[sequence]))),
      );
    this.found.replaceChildren(...items);
    const found = `${counted(this.hits.length)}${isMore ? " or more" : ""} found`;
    if (text) this.status.textContent = this.hits.length ? found : this.rejected(text);
    if (this.only.checked) this.applyFilter();
  }

  /** Returns the message if no request is found; the line with that id may be invalid. */
  rejected(text) {
    for (const { rejects } of this.view.runs) {
      const number = rejects.id.findIndex((id) => id.includes(text));
      if (number >= 0) return visible(rejects.story[number].join(" "));
    }
    return "no id contains this text";
  }

  goTo(number) {
    const { length } = this.hits;
    if (!length) return;
    this.hit = (number + length) % length;
    const { run, sequence } = this.hits[this.hit];
    this.page.choose(run, sequence);
    const label = visible(run.sequences.label[sequence], 60);
    this.status.textContent = `${counted(this.hit + 1)} of ${counted(length)}: ${label}`;
  }

  onFindKey(event) {
    if (event.key === "Enter") this.goTo(this.hit + (event.shiftKey ? -1 : 1));
    else if (event.key === "Escape") this.page.charts[0].canvas.focus();
    else return;
    event.preventDefault();
  }

  applyFilter(opening = {}) {
    const text = this.only.checked ? this.find.value : "";
    const chosen = { text, outcome: this.outcome.value, state: this.state.value };
    this.view.setFilter({ ...NO_FILTER, ...chosen, ...opening });
    const { filtered } = this.view;
    const compared = this.page.facts.diff ? filtered.slice(0, 1) : filtered; // A of two
    const shown = d3.sum(compared, (of) => of.number);
    const total = d3.sum(compared, (of) => of.shows.length);
    this.status.textContent = filtered[0].isAll ? "" : `${counted(shown)} of ${plural(total, "span")} shown`;
  }

  clear() {
    this.only.checked = false;
    this.outcome.value = this.state.value = "";
    this.applyFilter();
  }
}
