"use strict";
// The story of a request from the records of its run, as `batchdecode trace why --json` has it.
// batcher/explaining/story.py defines it; tests/browser compares the two for every request.

/** Returns what the run tells of an id: the stories of its samples, and its lines that were invalid. */
function answerOf(run, id) {
  const stories = run
    .withId(id)
    .filter((number) => !run.isFollower(number))
    .map((number) => storyOf(run, number));
  const rejects = [];
  for (let i = 0; i < run.rejects.rows; i++)
    if (run.rejects.id.at(i) === id) rejects.push(JSON.parse(run.rejects.event.at(i)));
  return { stories, rejects };
}

/** Returns the story of a sequence that waits on its own account. */
function storyOf(run, number) {
  const { sequences } = run;
  const more = moreOf(sequences, number);
  const request = {
    id: sequences.id.at(number),
    index: sequences.index[number],
    numRows: sequences.num_rows[number],
    hasArrived: !Number.isNaN(sequences.time[number]),
    start: sequences.arrived[number],
    end: run.numSteps,
    spans: Array.from(run.spansOf(number)),
  };
  const reason = run.facts.outcomes[sequences.reason[number]];
  const last = sequences.last[number];
  const inSlot = Boolean(sequences.flags[number] & IN_SLOT);
  if (reason) request.end = Math.min(last + inSlot, run.numSteps);
  const parts = request.hasArrived ? partsOf(run, request) : [];
  const seconds = secondsOf(run, sequences.time[number], parts);
  const kvBlocks = run.settings.scheduling?.kv_blocks;
  const story = {
    id: request.id,
    index: request.index,
    label: labelOf(request.id, request.index, run.roleOf(number)),
    num_rows: request.numRows,
    batch: run.numSlots,
    kv_blocks: Number.isInteger(kvBlocks) ? kvBlocks : null,
    arrived: request.hasArrived
      ? withoutDefaults({
          step: request.start,
          time: sequences.time[number],
          prompt_tokens: sequences.prompt[number],
          max_tokens: sequences.limit[number],
          dropped_turns: more.dropped_turns,
          dropped_tokens: more.dropped_tokens,
        })
      : null,
    parts,
    spans: request.spans.map((span) => storySpan(run, span, sequences.time[number])),
    ended: reason
      ? withoutDefaults({
          step: last,
          time: run.spansOf(number).length && inSlot ? run.times.endOf(last) : more.end_time,
          reason,
          tokens: sequences.tokens[number],
          limit: more.limit,
          error: more.error,
        })
      : null,
    steps: totalsOf(
      parts,
      parts.map((part) => part.end - part.start),
    ),
    seconds: totalsOf(parts, seconds),
  };
  return run.facts.is_timed ? { ...story, is_timed: true } : story;
}

/** Returns what is told of a span; arrival: when its sequence arrived, NaN if nothing tells. */
function storySpan(run, span, arrival) {
  const { spans } = run;
  const start = spans.start[span];
  const more = moreOf(spans, span);
  const { aging } = run.facts;
  const isAged = aging !== null && run.times.startOf(start) - arrival >= aging;
  return withoutDefaults(
    {
      slot: spans.slot[span],
      start,
      end: run.end(span),
      time: run.times.startOf(start),
      first_token: firstToken(run, span),
      cached: spans.cached[span],
      cached_from: more.cached_from,
      generated: spans.generated[span],
      drafts: more.drafts,
      preemption: more.preemption,
      is_remote: run.settings.layout === "remote",
      retries: more.retries ?? [],
      aging: isAged ? aging : undefined,
    },
    { cached: 0, generated: 0, is_remote: false },
  );
}

/** Returns the step that was through with what a span began with; null if none was. */
function firstToken(run, span) {
  const { start, prefill, flags } = run.spans;
  return flags[span] & HAS_FIRST_TOKEN ? start[span] + prefill[span] - 1 : null;
}

/** Returns the parts of a request, from its arrival to its end, each as long as it may be. */
function partsOf(run, request) {
  const parts = [];
  const add = (part) => {
    const last = parts.at(-1);
    if (part.start >= part.end) return;
    if (last && ["phase", "cause", "behind", "blocks"].every((name) => last[name] === part[name]))
      last.end = part.end;
    else parts.push(part);
  };
  let step = request.start;
  for (const span of request.spans) {
    waitingParts(run, request, step, run.spans.start[span], add);
    slotParts(run, span, add);
    step = run.end(span);
  }
  waitingParts(run, request, step, request.end, add);
  for (const part of parts.filter((part) => part.phase === "wait")) {
    part.by = run.holders(part.start);
    part.num_passed = passedIn(run, part.start, part.end);
  }
  return parts.map((part) => withoutDefaults(part, { cause: "", behind: null, blocks: 0, num_passed: 0 }));
}

/** Adds the parts of a wait over [start, end): where no slot is free, nothing else counts. */
function waitingParts(run, request, start, end, add) {
  const { slots } = run.series;
  const { blocked } = run;
  let stretch = slots ? Math.max(0, lastUpTo(slots.step, start)) : 0;
  let block = firstAbove(blocked.end, start);
  for (let step = start; step < end;) {
    let until = end;
    while (slots && stretch + 1 < slots.rows && slots.step[stretch + 1] <= step) stretch++;
    if (slots && stretch + 1 < slots.rows) until = Math.min(until, slots.step[stretch + 1]);
    while (block < blocked.rows && blocked.end[block] <= step) block++;
    const isBlocked = block < blocked.rows && blocked.start[block] <= step;
    if (block < blocked.rows) until = Math.min(until, isBlocked ? blocked.end[block] : blocked.start[block]);
    const numFree = run.numSlots - (slots ? slots.value[stretch] : 0);
    const part = { start: step, end: until, phase: "wait", cause: "", behind: null, blocks: 0 };
    if (numFree && isBlocked) {
      const id = blocked.id.at(block);
      const index = blocked.index[block];
      part.cause = run.facts.reasons[blocked.reason[block]];
      part.behind = id === request.id && index === request.index ? null : labelOf(id, index, "sample");
      part.blocks = blocked.blocks[block];
    } else part.cause = numFree < request.numRows ? "slots" : "queue";
    add(part);
    step = until;
  }
}

/** Adds the parts of a slot span: what it began with, up to the first token, then what follows. */
function slotParts(run, span, add) {
  const start = run.spans.start[span];
  const end = run.end(span);
  const first = firstToken(run, span) ?? end - 1;
  const isRemote = run.settings.layout === "remote";
  const part = (from, to, phase, cause) =>
    add({ start: from, end: to, phase, cause, behind: null, blocks: 0 });
  if (isRemote) {
    part(start, first + 1, "prefill", "");
    part(first + 1, end, "decode", "");
    return;
  }
  const still = run.settings.scheduling?.prefill_order === "prefill-first" ? "prefill" : "tokens";
  let begin = start;
  for (const computing of [
    ...(run.spans.flags[span] & HAS_SHARE ? [start] : []),
    ...(moreOf(run.spans, span).chunks ?? []),
  ]) {
    if (computing > first) break;
    part(begin, computing, "prefill", still);
    part(computing, computing + 1, "prefill", "");
    begin = computing + 1;
  }
  part(begin, first + 1, "prefill", still);
  const { standstill } = run.series;
  for (let step = first + 1; step < end;) {
    const at = standstill ? lastUpTo(standstill.step, step) : -1;
    const until = standstill && at + 1 < standstill.rows ? Math.min(end, standstill.step[at + 1]) : end;
    const isStill = at >= 0 && step < run.facts.told_steps && standstill.value[at];
    part(step, isStill ? Math.min(until, run.facts.told_steps) : until, "decode", isStill ? "prefill" : "");
    step = isStill ? Math.min(until, run.facts.told_steps) : until;
  }
}

/** Returns how many that waited on their own account were admitted in the steps [start, end). */
function passedIn(run, start, end) {
  const { spans } = run;
  let number = 0;
  for (let i = firstAbove(spans.start, start - 1); i < spans.rows && spans.start[i] < end; i++)
    number += !run.isFollower(spans.sequence[i]);
  return number;
}

/** Returns how long each of `parts` lasted; the first begins with the arrival. */
function secondsOf(run, arrival, parts) {
  if (!parts.length) return [];
  const begins = parts.map((part, i) => (i ? run.times.startOf(part.start) : arrival));
  return parts.map(
    (part, i) => (i + 1 < parts.length ? begins[i + 1] : run.times.endOf(part.end - 1)) - begins[i],
  );
}

/** Returns the sums of `amounts`, one for each of `parts`, by phase. */
function totalsOf(parts, amounts) {
  const sums = { wait: 0, preempted: 0, prefill: 0, decode: 0, standstill: 0 };
  let waiting = "wait";
  parts.forEach((part, i) => {
    if (part.phase === "wait") sums[waiting] += amounts[i];
    else {
      waiting = "preempted";
      sums[part.cause ? "standstill" : part.phase] += amounts[i];
    }
  });
  for (const phase of Object.keys(sums)) sums[phase] = Number(sums[phase].toFixed(9));
  return sums;
}
