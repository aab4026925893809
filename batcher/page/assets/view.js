"use strict";
// What is looked at: a stretch of time, a request, and those that a filter lets through.
// Whoever changes any of it calls `changed`, and all that draw it do so in the next frame.

const FAILURES = ["preempted", "error", "aborted", "lost"]; // the outcomes that are marked
const GUTTER = 56; // for names of slots and lanes, in CSS pixels

class View {
  constructor(runs) {
    this.runs = runs;
    this.isTimed = false; // whether x is seconds, or else steps
    this.transform = d3.zoomIdentity;
    this.width = 800;
    this.selected = null; // {run, sequence, span}
    this.pointed = null; // {run, step, slot, span}
    this.filter = NO_FILTER;
    this.filtered = runs.map((run) => new Filtered(run, this.filter));
    this.watchers = [];
  }

  /** Whether the events of all runs tell times. */
  get canBeTimed() {
    return this.runs.every((run) => run.hasTimes);
  }

  changed() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      for (const draw of this.watchers) draw(this);
    });
  }

  /** How far x goes, in steps or seconds. */
  get total() {
    const ends = this.runs.map((run) =>
      this.isTimed && run.numSteps ? run.times.endOf(run.numSteps - 1) : run.numSteps,
    );
    return Math.max(1e-9, ...ends);
  }

  get base() {
    return d3.scaleLinear([0, this.total], [GUTTER, this.width]);
  }

  /** From steps or seconds to CSS pixels. */
  get x() {
    return this.transform.rescaleX(this.base);
  }

  /** Returns where `step` begins, in steps or seconds. */
  begin(run, step) {
    return this.isTimed ? run.times.startOf(step) : step;
  }

  /** Returns where the step before `step` ends, in steps or seconds. */
  end(run, step) {
    return this.isTimed && step ? run.times.endOf(step - 1) : step;
  }

  /** Returns the position in steps of a time in seconds or steps: within a step a fraction of it. */
  position(run, unit) {
    if (!this.isTimed) return Math.min(Math.max(unit, 0), run.numSteps);
    let low = 0;
    let high = run.numSteps;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (run.times.startOf(middle) > unit) high = middle;
      else low = middle + 1;
    }
    if (!low) return 0;
    const start = run.times.startOf(low - 1);
    const end = run.times.endOf(low - 1);
    return low - 1 + Math.min(1, end > start ? (unit - start) / (end - start) : 1);
  }

  setFilter(filter) {
    this.filter = filter;
    this.filtered = this.runs.map((run) => new Filtered(run, filter));
    this.changed();
  }

  /** Selects a sequence of a run, that which waits on its own account; null for none. */
  select(run, sequence, span = null) {
    this.selected = run && {
      run,
      sequence: run.leaderOf(sequence),
      span: span ?? run.spansOf(sequence)[0] ?? null,
    };
    this.onSelect?.(this.selected);
    this.changed();
  }
}

// ids: a set of whole ids, or null; text: a part of an id; outcome, state: "" for all; slots: a set.
const NO_FILTER = { ids: null, text: "", outcome: "", state: "", slots: null };

/** Which spans of a run a filter lets through, and what of each, summed up in the order of slots. */
class Filtered {
  constructor(run, filter) {
    const { spans, sequences, bySlot } = run;
    const { rows } = spans;
    const wanted = wantedSequences(run, filter);
    const outcome = run.facts.outcomes.indexOf(filter.outcome);
    const preempted = run.facts.outcomes.indexOf("preempted");
    const failed = new Set(FAILURES.map((name) => run.facts.outcomes.indexOf(name)));
    this.isAll = Object.keys(NO_FILTER).every((name) => filter[name] === NO_FILTER[name]);
    this.shows = new Uint8Array(rows);
    this.number = 0;
    this.busy = new Float64Array(rows + 1); // steps of all spans before one
    this.prefill = new Float64Array(rows + 1); // of those that are shown, up to the first token
    this.decode = new Float64Array(rows + 1); // the others
    this.marks = new Uint32Array(rows + 1); // how many that are shown ended by a preemption or failed
    for (let at = 0; at < rows; at++) {
      const span = bySlot[at];
      const sequence = spans.sequence[span];
      const isShown =
        (!wanted || wanted[sequence]) &&
        (!filter.slots || filter.slots.has(run.firstSlot + spans.slot[span])) &&
        (!filter.outcome || spans.outcome[span] === outcome || sequences.reason[sequence] === outcome) &&
        (filter.state !== "preempted" || spans.outcome[span] === preempted) &&
        (filter.state !== "waiting" || hasWaited(run, span));
      const steps = spans.steps[span];
      const prefill = Math.min(steps, spans.prefill[span]);
      this.shows[span] = isShown;
      this.number += isShown;
      this.busy[at + 1] = this.busy[at] + steps;
      this.prefill[at + 1] = this.prefill[at] + (isShown && filter.state !== "decode" ? prefill : 0);
      this.decode[at + 1] = this.decode[at] + (isShown && filter.state !== "prefill" ? steps - prefill : 0);
      this.marks[at + 1] = this.marks[at] + (isShown && failed.has(spans.outcome[span]));
    }
  }
}

/** Returns which sequences have a wanted id, as an array of 0 and 1; null if all have. */
function wantedSequences(run, filter) {
  if (!filter.ids && !filter.text) return null;
  const wanted = new Uint8Array(run.sequences.rows);
  const { id } = run.sequences;
  for (const name of filter.ids ?? [filter.text])
    for (const sequence of id?.search(name) ?? [])
      if (!filter.ids || id.at(sequence) === name) wanted[sequence] = 1;
  return wanted;
}

/** Whether the sequence of a span waited for it. */
function hasWaited(run, span) {
  const { spans, sequences } = run;
  const sequence = spans.sequence[span];
  const hasArrived = !Number.isNaN(sequences.time[sequence]);
  return (
    Boolean(spans.flags[span] & RESUMED) || (hasArrived && sequences.arrived[sequence] < spans.start[span])
  );
}

/** Returns a text from a trace as it can be shown: what is not visible, or turns text, as escapes. */
function visible(text, most = 200) {
  const shown = text.length > most ? `${text.slice(0, most / 2)}…${text.slice(-most / 2)}` : text;
  return shown.replace(
    /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu,
    (one) => `\\u{${one.codePointAt(0).toString(16)}}`,
  );
}

const counted = (number) => number.toLocaleString("en-US");

/** Returns a time or a number such that a thousandth shows if it is not whole. */
const decimal = (number) => number.toLocaleString("en-US", { maximumFractionDigits: 3 });
