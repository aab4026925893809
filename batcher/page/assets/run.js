"use strict";
// A run as a page sees it: who held which slot when, what the steps were, and who is found by name.
// Its tables are those of batcher/page/tables.py.

// Flags of a span; 1, that it has no result since other samples are better, is not shown.
const RESUMED = 2;
const HAS_FIRST_TOKEN = 4;
const HAS_SHARE = 8;
const IN_SLOT = 1; // flag of a sequence

class Run {
  constructor({ run: facts, ...tables }) {
    this.facts = facts;
    this.name = facts.name;
    this.settings = facts.run;
    this.numSteps = facts.num_steps;
    this.numSlots = facts.run.batch;
    this.firstSlot = facts.first_slot; // the number of the first: other workers have those before it
    const none = { rows: 0 };
    this.spans = tables.spans ?? {
      ...none,
      start: [],
      steps: [],
      slot: [],
      sequence: [],
      outcome: [],
      prefill: [],
    };
    this.sequences = tables.sequences ?? none;
    this.blocked = tables.blocked ?? { ...none, start: [], end: [] };
    this.rejects = tables.rejects ?? none;
    this.series = {};
    for (const name of ["slots", "waiting", "tokens", "blocks", "standstill"])
      if (tables[name]) this.series[name] = new Series(tables[name], this.numSteps);
    this.times = new Times(tables.ends?.time ?? [], tables.starts ?? { step: [], time: [] });
    this.sortBySlot();
  }

  get hasTimes() {
    return this.facts.has_times;
  }

  /** Puts spans by their slots: `bySlot` from `slotStart[slot]` on, and their steps beside them. */
  sortBySlot() {
    const { rows, slot, start, steps } = this.spans;
    const slotStart = (this.slotStart = new Uint32Array(this.numSlots + 1));
    for (let i = 0; i < rows; i++) slotStart[slot[i] + 1]++;
    for (let i = 0; i < this.numSlots; i++) slotStart[i + 1] += slotStart[i];
    const next = slotStart.slice();
    this.bySlot = new Uint32Array(rows);
    this.starts = new Uint32Array(rows);
    this.ends = new Uint32Array(rows);
    for (let i = 0; i < rows; i++) {
      const at = next[slot[i]]++;
      this.bySlot[at] = i;
      this.starts[at] = start[i];
      this.ends[at] = start[i] + steps[i];
    }
  }

  end(span) {
    return this.spans.start[span] + this.spans.steps[span];
  }

  /** Returns where in `bySlot` the last span of a slot is that begins up to `step`; -1 for none. */
  placeAt(slot, step) {
    const first = this.slotStart[slot];
    const at = firstAbove(this.starts, step, first, this.slotStart[slot + 1]) - 1;
    return at < first ? -1 : at;
  }

  /** Returns the span that holds `slot` in `step`; -1 for none. */
  spanAt(slot, step) {
    const at = this.placeAt(slot, step);
    return at >= 0 && this.ends[at] > step ? this.bySlot[at] : -1;
  }

  /** Returns the labels of those who hold slots in `step`, by slot. */
  holders(step) {
    const labels = [];
    for (let slot = 0; slot < this.numSlots; slot++) {
      const span = this.spanAt(slot, step);
      if (span >= 0) labels.push(this.label(this.spans.sequence[span]));
    }
    return labels;
  }

  roleOf(sequence) {
    return this.facts.roles[this.sequences.role[sequence]];
  }

  label(sequence) {
    return labelOf(this.sequences.id.at(sequence), this.sequences.index[sequence], this.roleOf(sequence));
  }

  /** Whether it came along with another one: a beam but the first, or a negative prompt. */
  isFollower(sequence) {
    const role = this.roleOf(sequence);
    return role === "negative" || (role === "beam" && this.sequences.index[sequence] > 0);
  }

  /** Returns the spans of each sequence, ascending: where they begin in `spans`, and all of them. */
  get spansOf() {
    const { rows, sequence } = this.spans;
    const starts = new Uint32Array(this.sequences.rows + 1);
    const spans = new Uint32Array(rows);
    for (let i = 0; i < rows; i++) starts[sequence[i] + 1]++;
    for (let i = 0; i < this.sequences.rows; i++) starts[i + 1] += starts[i];
    const next = starts.slice();
    for (let i = 0; i < rows; i++) spans[next[sequence[i]]++] = i;
    const of = (number) => spans.subarray(starts[number], starts[number + 1]);
    Object.defineProperty(this, "spansOf", { value: of });
    return of;
  }

  /** Returns the sequences of exactly this id, as they became known. */
  withId(id) {
    const ids = this.sequences.id;
    if (!ids) return [];
    return id ? [...ids.search(id)].filter((number) => ids.at(number) === id) : [];
  }

  /** Returns those of them that are sample `index`, and came along with no other. */
  named(id, index) {
    return this.withId(id).filter(
      (number) => this.sequences.index[number] === index && !this.isFollower(number),
    );
  }

  /** Returns the sequence whose story tells of `sequence`: that which it came along with. */
  leaderOf(sequence) {
    if (!this.isFollower(sequence)) return sequence;
    const isBeam = this.roleOf(sequence) === "beam";
    const { id, index } = this.sequences;
    const wanted = isBeam ? 0 : index[sequence];
    const before = this.named(id.at(sequence), wanted).filter((number) => number < sequence);
    return before.at(-1) ?? sequence;
  }
}

/** Returns what a row has that few rows have. */
function moreOf(table, row) {
  const text = table.more.at(row);
  return text ? JSON.parse(text) : {};
}

/** Returns `record` without what is as `defaults` say, not there or an empty list. */
function withoutDefaults(record, defaults = {}) {
  const says = ([name, value]) =>
    value !== undefined && value !== defaults[name] && !(Array.isArray(value) && !value.length);
  return Object.fromEntries(Object.entries(record).filter(says));
}

/** Returns what a sequence is called: a, a#1, and a~ for a negative prompt. */
function labelOf(id, index, role) {
  return (index ? `${id}#${index}` : id) + (role === "negative" ? "~" : "");
}

/** A number for each step, as steps from which on it is another one: [`step`, `value`]. */
class Series {
  constructor({ rows, step, value }, numSteps) {
    this.rows = rows;
    this.step = step;
    this.value = value;
    this.sums = new Float64Array(rows + 1);
    this.largest = [value]; // of 32 of the array before
    for (let i = 0; i < rows; i++) {
      const end = i + 1 < rows ? step[i + 1] : numSteps;
      this.sums[i + 1] = this.sums[i] + (end - step[i]) * value[i];
    }
    while (this.largest.at(-1).length > 32) {
      const below = this.largest.at(-1);
      const above = new Float64Array(Math.ceil(below.length / 32));
      for (let i = 0; i < below.length; i++) if (below[i] > above[i >> 5]) above[i >> 5] = below[i];
      this.largest.push(above);
    }
  }

  at(step) {
    const i = lastUpTo(this.step, step);
    return i < 0 ? 0 : this.value[i];
  }

  /** Returns the sum of the steps before `position`, which may be within one. */
  sumTo(position) {
    const i = lastUpTo(this.step, position);
    return i < 0 ? 0 : this.sums[i] + (position - this.step[i]) * this.value[i];
  }

  /** Returns the largest number in the steps from `start` to before `end`. */
  largestIn(start, end) {
    let low = Math.max(0, lastUpTo(this.step, start));
    let high = Math.max(low + 1, firstAbove(this.step, end - 1e-9));
    let most = 0;
    for (const numbers of this.largest) {
      while (low < high && (low & 31 || high - low < 32)) most = Math.max(most, numbers[low++]);
      while (low < high && high & 31) most = Math.max(most, numbers[--high]);
      low >>= 5;
      high >>= 5;
      if (low >= high) break;
    }
    return most;
  }

  get most() {
    return this.largest.at(-1).reduce((most, number) => Math.max(most, number), 0);
  }
}

/** When steps began and ended, in seconds: as StepFigures of batcher/trace/recording.py says. */
class Times {
  constructor(ends, starts) {
    this.ends = ends;
    this.knownSteps = starts.step;
    this.knownStarts = starts.time;
  }

  get usualDuration() {
    const last = this.ends.length - 1;
    return last >= 0 ? this.ends[last] - this.startOf(last) : 1;
  }

  startOf(step) {
    const number = lastUpTo(this.knownSteps, step);
    let knownStep = number >= 0 ? this.knownSteps[number] : 0;
    let knownStart = number >= 0 ? this.knownStarts[number] : 0;
    if (knownStep === step || !step) return knownStart;
    if (step <= this.ends.length) return this.ends[step - 1];
    if (knownStep < this.ends.length) {
      knownStep = this.ends.length;
      knownStart = this.ends[knownStep - 1];
    }
    const likely = knownStart + (step - knownStep) * this.usualDuration;
    return number + 1 < this.knownStarts.length ? Math.min(likely, this.knownStarts[number + 1]) : likely;
  }

  endOf(step) {
    if (step < this.ends.length) return this.ends[step];
    return Math.min(this.startOf(step) + this.usualDuration, this.startOf(step + 1));
  }
}
