// Evaluated in a page, to compare what it is drawn from with what a trace has.

/** Returns a span of a page as the line of `--format spans` that it is; what says nothing is left out. */
function spanRecord(run, number) {
  const { spans, sequences, facts } = run;
  const sequence = spans.sequence[number];
  const flags = spans.flags[number];
  const { forks = [], preemption = null, cached_from } = moreOf(spans, number);
  return withoutDefaults(
    {
      slot: spans.slot[number],
      id: sequences.id.at(sequence),
      index: sequences.index[sequence],
      start: spans.start[number],
      end: run.end(number),
      outcome: facts.outcomes[spans.outcome[number]] || null,
      role: run.roleOf(sequence),
      jumped: spans.jumped[number],
      drafted: spans.drafted[number],
      accepted: spans.accepted[number],
      dropped: Boolean(flags & 1),
      forks,
      prefill: spans.prefill[number],
      cached: spans.cached[number],
      generated: spans.generated[number],
      resumed: Boolean(flags & RESUMED),
      preemption,
      cached_from,
    },
    {
      role: "sample",
      jumped: 0,
      drafted: 0,
      accepted: 0,
      dropped: false,
      prefill: 1,
      cached: 0,
      generated: 0,
      resumed: false,
      preemption: null,
    },
  );
}
