"use strict";
// The visible stretch of time, the selected request and the filter.
// Call `changed` after a change: `draw` is called in the next frame.

const FAILURES = ["preempted", "error", "aborted", "lost"]; // the outcomes that are marked
const GUTTER = 56; // for names of slots and lanes, in CSS pixels

class View {
  constructor(runs, draw) {
    this.runs = runs;
    this.draw = draw;
    this.isTimed = false; // x is seconds instead of steps
    this.canBeTimed = runs.every((run) => run.times);
    this.transform = d3.zoomIdentity;
    this.width = 800;
    this.selected = null; // {run, sequence, span}
    this.pointed = null; // {run, step, slot, span}
    this.setFilter(NO_FILTER);
  }

  changed() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  /** Maps all steps or seconds to CSS pixels. */
  get base() {
    const total = Math.max(1e-9, ...this.runs.map((run) => this.end(run, run.numSteps)));
    return d3.scaleLinear([0, total], [GUTTER, this.width]);
  }

  /** Maps the visible steps or seconds to CSS pixels. */
  get x() {
    return this.transform.rescaleX(this.base);
  }

  /** Returns the start of `step` in steps or seconds. */
  begin(run, step) {
    return this.isTimed ? run.times.startOf(step) : step;
  }

  /** Returns the end of the step before `step` in steps or seconds. */
  end(run, step) {
    return this.isTimed && step ? run.times.endOf(step - 1) : step;
  }

  /** Returns a time in seconds or steps as steps, with a fraction. */
  position(run, unit) {
    return this.isTimed ? run.times.positionOf(unit) : Math.min(Math.max(unit, 0), run.numSteps);
  }

  setFilter(filter) {
    this.filter = filter;
    this.filtered = this.runs.map((run) => new Filtered(run, filter));
    this.changed();
  }
}

// ids: a set of whole ids, or null; text: a part of an id; outcome, state: "" for all; slots: a set.
const NO_FILTER = { ids: null, text: "", outcome: "", state: "", slots: null };

/** The spans of a run that a filter lets through: `shows` has a 1 for each, `number` counts them. */
class Filtered {
  constructor(run, { ids, text, outcome, state, slots }) {
    const { spans, sequences } = run;
    const { outcomes } = run.facts;
    this.isAll = !ids && !text && !outcome && !state && !slots;
    this.shows = Uint8Array.from(spans.slot, (slot, span) => {
      const sequence = spans.sequence[span];
      const id = sequences.id[sequence];
      const ended = outcomes[spans.outcome[span]];
      const hasWaited = spans.resumed[span] || sequences.arrived[sequence] < spans.start[span];
      return (
        (!ids || ids.has(id)) &&
        id.includes(text) &&
        (!slots || slots.has(run.firstSlot + slot)) &&
        (!outcome || outcome === ended || outcome === outcomes[sequences.reason[sequence]]) &&
        (state !== "preempted" || ended === "preempted") &&
        (state !== "waiting" || hasWaited)
      );
    });
    this.number = d3.sum(this.shows);
  }
}

/** Returns a text from a trace with escapes for invisible characters and those that turn text. */
function visible(text, most = 200) {
  const shown = text.length > most ? `${text.slice(0, most / 2)}…${text.slice(-most / 2)}` : text;
  return shown.replace(
    /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu,
    (one) => `\\u{${one.codePointAt(0).toString(16)}}`,
  );
}

/** Returns a number with up to three decimals. */
const counted = (number) => number.toLocaleString("en-US", { maximumFractionDigits: 3 });
const plural = (number, what) => `${counted(number)} ${what}${number === 1 ? "" : "s"}`;
