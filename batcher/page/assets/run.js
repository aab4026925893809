"use strict";
// A run on a page, in the tables of batcher/page/page.py.

/** Returns the tables of a run, {name: {column: [...]}}, and its facts. */
async function unpack(base64) {
  const packed = new Blob(base64.trim().split("\n").map(bytesOf)).stream();
  const lines = await new Response(packed.pipeThrough(new DecompressionStream("gzip"))).text();
  const found = {};
  for (const line of lines.trimEnd().split("\n")) {
    const [name, content] = JSON.parse(line);
    if (name === "run") {
      found.facts = content;
      continue;
    }
    const table = (found[name] ??= {});
    for (const [column, values] of Object.entries(content)) {
      const all = (table[column.replace("+", "")] ??= []);
      let last = all.at(-1) ?? 0; // a column with a + has the differences from row to row
      for (const value of values) all.push(column[0] === "+" ? (last += value) : value);
    }
  }
  return found;
}

const bytesOf = (base64) => Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));

class Run {
  constructor({ facts, spans, sequences, waits, rejects, times, ...series }) {
    this.facts = facts;
    this.name = facts.name;
    this.numSteps = facts.num_steps;
    this.numSlots = facts.num_slots;
    this.firstSlot = facts.first_slot; // lower slots belong to other workers
    this.spans = spans ?? { start: [], steps: [], slot: [], sequence: [] };
    this.sequences = sequences ?? { id: [], label: [] };
    this.waits = waits ?? { start: [], end: [] };
    this.rejects = rejects ?? { id: [] };
    this.series = Object.fromEntries(Object.entries(series).map(([name, of]) => [name, new Series(of)]));
    this.times = times && new Times(times);
    // Spans by slot and by sequence, and where each slot and sequence begins.
    const { slot, start, steps, sequence } = this.spans;
    [this.bySlot, this.slotStart] = grouped(slot, this.numSlots);
    [this.bySequence, this.sequenceStart] = grouped(sequence, this.sequences.id.length);
    this.starts = this.bySlot.map((span) => start[span]);
    this.ends = this.bySlot.map((span) => start[span] + steps[span]);
  }

  end(span) {
    return this.spans.start[span] + this.spans.steps[span];
  }

  spansOf(sequence) {
    return this.bySequence.subarray(this.sequenceStart[sequence], this.sequenceStart[sequence + 1]);
  }

  /** Returns the place in `bySlot` of the last span of a slot that begins by `step`, or -1. */
  placeAt(slot, step) {
    const first = this.slotStart[slot];
    const at = firstAbove(this.starts, step, first, this.slotStart[slot + 1]) - 1;
    return at < first ? -1 : at;
  }

  /** Returns the span that holds `slot` in `step`, or -1. */
  spanAt(slot, step) {
    const at = this.placeAt(slot, step);
    return at >= 0 && this.ends[at] > step ? this.bySlot[at] : -1;
  }

  /** Returns the stretches [start, end) in which a sequence waited, with their reasons. */
  waitsOf(sequence) {
    const found = [];
    let from = this.sequences.arrived[sequence];
    for (const span of [...this.spansOf(sequence), null]) {
      const until = span === null ? this.sequences.end[sequence] : this.spans.start[span];
      for (let i = firstAbove(this.waits.end, from); from < until && this.waits.start[i] < until; i++) {
        const [start, end] = [Math.max(from, this.waits.start[i]), Math.min(until, this.waits.end[i])];
        found.push({ start, end, why: this.waits.why[i] });
      }
      from = span === null ? until : this.end(span);
    }
    return found;
  }
}

/** Returns the indices of `keys` sorted by key, and the place where each key begins. */
function grouped(keys, number) {
  const starts = new Uint32Array(number + 1);
  for (const key of keys) starts[key + 1]++;
  for (let key = 0; key < number; key++) starts[key + 1] += starts[key];
  const next = starts.slice();
  const indices = new Uint32Array(keys.length);
  for (let i = 0; i < keys.length; i++) indices[next[keys[i]]++] = i;
  return [indices, starts];
}

/** A number for each step, stored where it changes: from step[i] on it is value[i]. */
class Series {
  constructor({ step, value }) {
    this.step = step;
    this.value = value;
    this.most = value.reduce((most, one) => Math.max(most, one), 0);
  }

  at(step) {
    return this.value[firstAbove(this.step, step) - 1] ?? 0;
  }

  /** Returns [highest, mean] of the steps of each pixel; pixel i has the steps edges[i] to edges[i + 1]. */
  binned(edges) {
    const { step, value } = this;
    let i = Math.max(0, firstAbove(step, edges[0]) - 1);
    return Array.from(edges.subarray(1), (to, pixel) => {
      const from = edges[pixel];
      let [highest, sum] = [0, 0];
      for (; ; i++) {
        const [start, end] = [Math.max(from, step[i]), Math.min(to, step[i + 1] ?? to)];
        if (end > start) [highest, sum] = [Math.max(highest, value[i]), sum + (end - start) * value[i]];
        if (!(step[i + 1] <= to)) return [highest, to > from ? sum / (to - from) : 0];
      }
    });
  }
}

/** The begin and end of steps in seconds: of some steps as recorded, and evenly in between. */
class Times {
  constructor({ step, before, start }) {
    this.step = step;
    this.before = before; // the end of the step before
    this.start = start.map((seconds, i) => seconds ?? before[i]);
  }

  startOf(step) {
    const i = firstAbove(this.step, step) - 1;
    return this.step[i] === step ? this.start[i] : this.endOf(step - 1);
  }

  endOf(step) {
    const i = firstAbove(this.step, step);
    const [first, start] = [this.step[i - 1], this.start[i - 1]];
    return start + ((step + 1 - first) / (this.step[i] - first)) * (this.before[i] - start);
  }

  /** Returns the position in steps of a time: within a step a fraction of it. */
  positionOf(seconds) {
    const i = Math.max(1, firstAbove(this.start, seconds));
    if (i === this.step.length) return this.step.at(-1);
    const [first, start] = [this.step[i - 1], this.start[i - 1]];
    const share = this.before[i] > start ? (seconds - start) / (this.before[i] - start) : 1;
    return first + Math.min(1, Math.max(0, share)) * (this.step[i] - first);
  }
}

/** Returns the index of the first of `ascending` that is above `value`, between `low` and `high`. */
function firstAbove(ascending, value, low = 0, high = ascending.length) {
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (ascending[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}
