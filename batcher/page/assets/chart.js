"use strict";
// Draws a run: slots against time, with a lane below for each number of steps.
// Spans wider than a few pixels are bars; narrower ones are shades, which mix their colours.

const LEAST_LANE = 44; // lanes take what the rows leave
const ROW_HEIGHTS = [2, 72];
const LEAST_ROOM = 80; // for all rows
const LABEL_ROW = 11;
const SPANS_PER_PIXEL = 0.12;
const LEAST_HATCHED = 4;
const LANES = { slots: "slots in use", waiting: "waiting", tokens: "tokens / step", blocks: "KV blocks" };
const COLORS =
  "background text faint prefill hatch dim mark chosen on-span lane lane-most lane-mean".split(" ");

class Chart {
  constructor(view, run, parent) {
    this.view = view;
    this.run = run;
    const label = `Timeline of ${visible(run.name)}: ${visible(run.facts.headline)}. Press ? for keys.`;
    const attributes = { tabindex: 0, role: "application", "aria-label": label };
    this.canvas = parent.appendChild(element("canvas", attributes));
    this.context = this.canvas.getContext("2d");
    this.shade = document.createElement("canvas");
    this.lanes = Object.keys(LANES).filter((name) => run.series[name]?.most);
    this.top = 0; // of the visible rows, in CSS pixels from slot 0
    this.marked = null; // a step with a line through it
    this.rowScale = 1;
  }

  /** Fits the chart into CSS pixels. */
  resize(width, height) {
    const room = Math.max(LEAST_ROOM, height - this.lanes.length * LEAST_LANE);
    const [least, most] = ROW_HEIGHTS;
    const fitting = Math.max(least, Math.min(most, room / this.run.numSlots));
    this.rowHeight = Math.min(2 * most, fitting * this.rowScale);
    this.rowsHeight = Math.max(40, Math.min(room, this.rowHeight * this.run.numSlots));
    this.width = width;
    this.laneHeight = Math.max(LEAST_LANE, (height - this.rowsHeight) / (this.lanes.length || 1));
    this.height = Math.round(this.rowsHeight + this.laneHeight * this.lanes.length);
    this.ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * this.ratio);
    this.canvas.height = Math.round(this.height * this.ratio);
    this.canvas.style.height = `${this.height}px`;
    this.scrollRows(0);
  }

  scrollRows(by) {
    const most = Math.max(0, this.run.numSlots * this.rowHeight - this.rowsHeight);
    this.top = Math.min(most, Math.max(0, this.top + by));
  }

  /** Returns the step, and the slot and span or the lane, at a point in CSS pixels. */
  at(x, y) {
    const { view, run } = this;
    const step = Math.min(run.numSteps - 1, Math.floor(view.position(run, view.x.invert(x))));
    if (x < GUTTER || step < 0) return null;
    if (y >= this.rowsHeight)
      return { run, step, lane: this.lanes[Math.floor((y - this.rowsHeight) / this.laneHeight)] };
    const slot = Math.floor((y + this.top) / this.rowHeight);
    return slot < run.numSlots ? { run, step, slot, span: run.spanAt(slot, step) } : null;
  }

  draw() {
    const { context, view, run, ratio } = this;
    this.colors = colorsOfPage();
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = this.colors.background;
    context.fillRect(0, 0, this.width, this.height);
    const { x } = view;
    const first = Math.round(GUTTER * ratio);
    const edges = new Float64Array(this.canvas.width - first + 1); // in steps, where pixels begin
    for (let i = 0; i < edges.length; i++) edges[i] = view.position(run, x.invert((first + i) / ratio));
    this.clipped(() => this.drawRows(x, edges));
    this.drawLanes(edges);
    this.drawLines(x);
    this.clipped(() => this.drawSelected(x));
    this.drawNames();
  }

  /** Draws within the rows. */
  clipped(draw) {
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, this.width - GUTTER, this.rowsHeight);
    context.clip();
    draw();
    context.restore();
  }

  drawRows(x, edges) {
    const { run, rowHeight } = this;
    const first = Math.floor(this.top / rowHeight);
    const last = Math.min(run.numSlots - 1, Math.floor((this.top + this.rowsHeight - 0.01) / rowHeight));
    for (let slot = first; slot <= last; slot++) {
      const from = Math.max(run.slotStart[slot], run.placeAt(slot, Math.floor(edges[0])));
      const to = firstAbove(run.starts, edges.at(-1), from, run.slotStart[slot + 1]);
      if (to - from > (this.width - GUTTER) * SPANS_PER_PIXEL) this.drawShades(slot, from, to, edges);
      else this.drawSpans(x, slot, from, to);
    }
  }

  drawSpans(x, slot, from, to) {
    const { run, view, context, colors, rowHeight } = this;
    const { spans } = run;
    const { shows } = view.filtered[view.runs.indexOf(run)];
    const { state } = view.filter;
    const y = slot * rowHeight - this.top;
    const height = rowHeight > 5 ? rowHeight - 1 : rowHeight;
    for (let at = from; at < to; at++) {
      const span = run.bySlot[at];
      const sequence = spans.sequence[span];
      const [start, end] = [run.starts[at], run.ends[at]];
      const left = Math.max(GUTTER - 4, x(view.begin(run, start)));
      const right = Math.min(this.width + 4, x(view.end(run, end)));
      if (right < GUTTER) continue;
      const width = Math.max(right - left - (right - left > 3 ? 1 : 0), 0.5);
      const prefillEnd = x(view.end(run, start + Math.min(end - start, spans.prefill[span])));
      const isDecode = shows[span] && state !== "prefill";
      context.fillStyle = isDecode ? colors.decode[sequence % colors.decode.length] : colors.dim;
      context.fillRect(left, y, width, height);
      if (shows[span] && state !== "decode" && prefillEnd > left) {
        const prefill = Math.min(width, prefillEnd - left);
        context.fillStyle = height > 5 && prefill > LEAST_HATCHED ? this.hatching() : colors.prefill;
        context.fillRect(left, y, prefill, height);
      }
      this.drawEnd(span, left, right, y + height / 2, height / 2);
      if (height >= LABEL_ROW && width > 26) {
        context.fillStyle = shows[span] ? colors["on-span"] : colors.faint;
        context.font = `${Math.min(12, height - 2)}px system-ui, sans-serif`;
        context.textBaseline = "middle";
        const from = Math.max(left, GUTTER, right - prefillEnd > 26 ? prefillEnd : 0); // beside the hatch
        const most = Math.floor((right - from - 6) / 6);
        const label = visible(run.sequences.label[sequence], 400);
        const text = label.length > most ? `${label.slice(0, Math.max(1, most - 1))}…` : label;
        context.fillText(text, from + 3, y + height / 2 + 0.5, Math.max(1, right - from - 5));
      }
    }
  }

  /** Marks the end of a span: a notch for a preemption, a cross for a failure. */
  drawEnd(span, left, right, middle, room) {
    const { context, colors, run } = this;
    const outcome = run.facts.outcomes[run.spans.outcome[span]];
    if (!FAILURES.includes(outcome) || right - left < 4) return;
    const size = Math.min(5, room, (right - left) / 2);
    const [top, bottom] = [middle - size, middle + size];
    context.strokeStyle = context.fillStyle = colors.mark;
    context.lineWidth = 1.5;
    if (outcome === "preempted") {
      const [near, far] = [right - 1, right - 1 - size * 1.5];
      context.fill(new Path2D(`M${near} ${top}L${far} ${middle}L${near} ${bottom}`));
    } else {
      const [near, far] = [right - 2, right - 2 - 2 * size];
      context.stroke(new Path2D(`M${near} ${top}L${far} ${bottom}M${far} ${top}L${near} ${bottom}`));
    }
  }

  hatching() {
    const { prefill, hatch } = this.colors;
    if (this.hatched?.color !== prefill) {
      const tile = element("canvas", { width: 6, height: 6 });
      const context = tile.getContext("2d");
      context.fillStyle = prefill;
      context.fillRect(0, 0, 6, 6);
      context.strokeStyle = hatch;
      context.lineWidth = 1.2;
      context.stroke(new Path2D("M-6 6L0 0M0 6L6 0M6 6L12 0"));
      this.hatched = { color: prefill, pattern: this.context.createPattern(tile, "repeat") };
    }
    return this.hatched.pattern;
  }

  /** Draws a row with many spans in a pixel: one pixel high, each a mix of colours, then stretched. */
  drawShades(slot, from, to, edges) {
    const { shade, context, colors, ratio, rowHeight, run, view } = this;
    const { spans, starts, ends, facts } = run;
    const { shows } = view.filtered[view.runs.indexOf(run)];
    const { state } = view.filter;
    const width = (shade.width = edges.length - 1);
    shade.height = 1;
    const [dims, prefills, decodes] = [0, 1, 2].map(() => new Float64Array(width)); // steps per pixel
    const failures = new Uint8Array(width);
    let first = 0; // the pixel in which the span begins
    const cover = (kind, start, end) => {
      let pixel = first;
      for (; pixel < width && edges[pixel] < end; pixel++)
        kind[pixel] += Math.max(0, Math.min(end, edges[pixel + 1]) - Math.max(start, edges[pixel]));
      return pixel - 1;
    };
    for (let at = from; at < to; at++) {
      const span = run.bySlot[at];
      const prefillEnd = Math.min(ends[at], starts[at] + spans.prefill[span]);
      while (first < width - 1 && edges[first + 1] <= starts[at]) first++;
      cover(shows[span] && state !== "decode" ? prefills : dims, starts[at], prefillEnd);
      const last = cover(shows[span] && state !== "prefill" ? decodes : dims, prefillEnd, ends[at]);
      const isSeen = shows[span] && last >= 0 && ends[at] <= edges[last + 1];
      if (isSeen && FAILURES.includes(facts.outcomes[spans.outcome[span]])) failures[last] = 1;
    }
    const rgb = (color) => [d3.rgb(color)].flatMap(({ r, g, b }) => [r, g, b]);
    const parts = [colors.background, colors.dim, colors.prefill, colors.decode[2], colors.mark].map(rgb);
    const image = new ImageData(width, 1);
    for (let pixel = 0; pixel < width; pixel++) {
      const length = edges[pixel + 1] - edges[pixel] || Infinity;
      const held = [dims, prefills, decodes].map((kind) => kind[pixel] / length);
      const failed = failures[pixel] ? 0.55 : 0;
      const shares = [Math.max(0, 1 - d3.sum(held)), ...held].map((share) => share * (1 - failed));
      for (let part = 0; part < 3; part++)
        image.data[4 * pixel + part] = d3.sum([...shares, failed], (share, kind) => share * parts[kind][part]);
      image.data[4 * pixel + 3] = 255;
    }
    shade.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    const height = rowHeight > 5 ? rowHeight - 1 : rowHeight;
    const left = Math.round(GUTTER * ratio) / ratio;
    context.drawImage(shade, 0, 0, width, 1, left, slot * rowHeight - this.top, width / ratio, height);
  }

  drawLanes(edges) {
    const { context, run, ratio, colors } = this;
    const first = Math.round(GUTTER * ratio) / ratio;
    this.lanes.forEach((name, number) => {
      const series = run.series[name];
      const top = this.rowsHeight + number * this.laneHeight + 6;
      const height = this.laneHeight - 8;
      context.fillStyle = colors.lane;
      context.fillRect(GUTTER, top, this.width - GUTTER, height);
      const scale = height / Math.max(1, name === "slots" ? run.numSlots : series.most);
      const numbers = series.binned(edges);
      [colors["lane-most"], colors["lane-mean"]].forEach((color, kind) => {
        const bars = new Path2D();
        numbers.forEach((pair, pixel) => {
          const tall = pair[kind] * scale;
          bars.rect(first + pixel / ratio, top + height - tall, 1 / ratio, tall);
        });
        context.fillStyle = color;
        context.fill(bars);
      });
    });
  }

  /** Draws vertical lines: restarts, the marked step, and the step under the pointer. */
  drawLines(x) {
    const { context, view, run, colors, marked } = this;
    const line = (step, color, dash) => {
      const at = x(view.begin(run, step));
      if (at < GUTTER || at > this.width) return;
      context.strokeStyle = color;
      context.setLineDash(dash);
      context.lineWidth = 1.5;
      context.stroke(new Path2D(`M${at} 0V${this.height}`));
      context.setLineDash([]);
    };
    for (const step of run.facts.restarts) line(step, colors.mark, [2, 3]);
    if (marked !== null) line(marked, colors.mark, [5, 3]);
    if (view.pointed?.run === run) line(view.pointed.step, colors.faint, [1, 2]);
  }

  /** Draws boxes around the spans of the selected request, connected by lines. */
  drawSelected(x) {
    const { context, view, run, colors, rowHeight } = this;
    if (view.selected?.run !== run) return;
    context.strokeStyle = colors.chosen;
    context.lineWidth = 2;
    let before = null;
    for (const span of run.spansOf(view.selected.sequence)) {
      const left = x(view.begin(run, run.spans.start[span]));
      const right = x(view.end(run, run.end(span)));
      const y = run.spans.slot[span] * rowHeight - this.top;
      const middle = y + rowHeight / 2;
      context.setLineDash([4, 3]);
      if (before) context.stroke(new Path2D(`${before}L${left} ${middle}`));
      context.setLineDash([]);
      context.strokeRect(left - 1, y - 1, Math.max(3, right - left) + 1, Math.max(4, rowHeight) + 1);
      before = `M${right} ${middle}`;
    }
  }

  drawNames() {
    const { context, run, colors, rowHeight } = this;
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colors.text;
    const every = Math.max(1, Math.ceil(13 / rowHeight));
    for (let slot = 0; slot < run.numSlots; slot += every) {
      const y = slot * rowHeight - this.top + rowHeight / 2;
      if (y >= 5 && y < this.rowsHeight - 4) context.fillText(String(run.firstSlot + slot), GUTTER - 6, y);
    }
    context.font = "10px system-ui, sans-serif";
    context.strokeStyle = colors.lane;
    context.lineWidth = 4;
    context.lineJoin = "round";
    this.lanes.forEach((name, number) => {
      const y = this.rowsHeight + number * this.laneHeight + 6;
      context.fillText(counted(name === "slots" ? run.numSlots : run.series[name].most), GUTTER - 4, y + 6);
      context.textAlign = "left";
      context.strokeText(LANES[name], GUTTER + 4, y + 8);
      context.fillText(LANES[name], GUTTER + 4, y + 8);
      context.textAlign = "right";
    });
    context.textAlign = "left";
  }
}

/** Returns the current colours of the style sheet. */
function colorsOfPage() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const decode = [1, 2, 3, 4, 5].map((number) => color(`decode-${number}`));
  return { decode, ...Object.fromEntries(COLORS.map((name) => [name, color(name)])) };
}
