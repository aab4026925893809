"use strict";
// One run drawn: its slots against time, and below them a lane for each number that steps have.
//
// Where spans are wider than a few pixels each is drawn; where many fall into one, the pixel is a
// shade: as much of each colour as it has of steps.  Either takes time for what is seen alone.

const LANE_HEIGHT = 44;
const ROW_HEIGHTS = [2, 26];
const LEAST_ROOM = 80; // for all rows, however low the window is
const LABEL_ROW = 11;
const SPANS_PER_PIXEL = 0.12;
const LEAST_HATCHED = 4;
const LANES = { slots: "slots in use", waiting: "waiting", tokens: "tokens / step", blocks: "KV blocks" };

class Chart {
  constructor(view, run, parent) {
    this.view = view;
    this.run = run;
    this.canvas = parent.appendChild(document.createElement("canvas"));
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute(
      "aria-label",
      `Timeline of ${visible(run.name)}: ${counted(run.numSlots)} slots, ${counted(run.numSteps)} steps, ` +
        `${counted(run.spans.rows)} spans. Arrow keys move, plus and minus zoom, Enter selects, ` +
        "question mark for help.",
    );
    this.context = this.canvas.getContext("2d");
    this.shade = document.createElement("canvas");
    this.lanes = Object.keys(LANES).filter((name) => run.series[name]);
    this.top = 0; // the first row that is seen, in CSS pixels from that of slot 0
    this.marked = null; // a step with a line through it
    this.rowScale = 1;
  }

  /** Takes as much room as the window has for it; `height` in CSS pixels. */
  resize(width, height) {
    const lanes = this.lanes.length * LANE_HEIGHT;
    const room = Math.max(LEAST_ROOM, height - lanes);
    const [least, most] = ROW_HEIGHTS;
    const fitting = room / this.run.numSlots;
    this.rowHeight = Math.min(most * 4, Math.max(least, Math.min(most, fitting)) * this.rowScale);
    this.rowsHeight = Math.max(40, Math.min(room, this.rowHeight * this.run.numSlots));
    this.width = width;
    this.height = Math.round(this.rowsHeight + lanes);
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

  /** Returns what lies at a point of the canvas, in CSS pixels: a step, and a slot and span or a lane. */
  at(x, y) {
    const { view, run } = this;
    const position = view.position(run, view.x.invert(x));
    const step = Math.min(run.numSteps - 1, Math.floor(position));
    if (x < GUTTER || step < 0) return null;
    if (y >= this.rowsHeight)
      return { chart: this, run, step, lane: this.lanes[Math.floor((y - this.rowsHeight) / LANE_HEIGHT)] };
    const slot = Math.floor((y + this.top) / this.rowHeight);
    return slot < run.numSlots ? { chart: this, run, step, slot, span: run.spanAt(slot, step) } : null;
  }

  draw() {
    const { context, view, run, ratio } = this;
    this.colors = colorsOfPage();
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = this.colors.background;
    context.fillRect(0, 0, this.width, this.height);
    const x = view.x;
    this.left = Math.floor(view.position(run, x.invert(GUTTER)));
    this.right = Math.ceil(view.position(run, x.invert(this.width)));
    this.edges = this.edgesOfPixels(x);
    this.drawRows(x);
    this.drawLanes(x);
    this.drawMarks(x);
    this.drawNames();
  }

  /** Returns the positions in steps where the pixels of the canvas, those of the screen, begin. */
  edgesOfPixels(x) {
    const { view, run, ratio } = this;
    const first = Math.round(GUTTER * ratio);
    const edges = new Float64Array(this.canvas.width - first + 1);
    for (let i = 0; i < edges.length; i++) edges[i] = view.position(run, x.invert((first + i) / ratio));
    return edges;
  }

  drawRows(x) {
    const { run, context, rowHeight } = this;
    const first = Math.floor(this.top / rowHeight);
    const last = Math.min(run.numSlots - 1, Math.floor((this.top + this.rowsHeight - 0.01) / rowHeight));
    const shaded = [];
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, this.width - GUTTER, this.rowsHeight);
    context.clip();
    for (let slot = first; slot <= last; slot++) {
      const from = Math.max(run.slotStart[slot], run.placeAt(slot, this.left));
      const to = firstAbove(run.starts, this.right, from, run.slotStart[slot + 1]);
      if (to - from > (this.width - GUTTER) * SPANS_PER_PIXEL) shaded.push(slot);
      else this.drawSpans(x, slot, from, to);
    }
    if (shaded.length) this.drawShades(shaded);
    context.restore();
  }

  drawSpans(x, slot, from, to) {
    const { run, view, context, colors, rowHeight } = this;
    const { spans } = run;
    const filtered = view.filtered[view.runs.indexOf(run)];
    const { state } = view.filter;
    const y = slot * rowHeight - this.top;
    const gap = rowHeight > 5 ? 1 : 0;
    const height = rowHeight - gap;
    for (let at = from; at < to; at++) {
      const span = run.bySlot[at];
      const sequence = spans.sequence[span];
      const start = run.starts[at];
      const end = run.ends[at];
      const left = Math.max(GUTTER - 4, x(view.begin(run, start)));
      const right = Math.min(this.width + 4, x(view.end(run, end)));
      if (right < GUTTER) continue;
      const isShown = filtered.shows[span];
      const width = Math.max(right - left - (right - left > 3 ? 1 : 0), 0.5);
      const prefillEnd = Math.min(
        right,
        Math.max(left, x(view.end(run, start + Math.min(spans.steps[span], spans.prefill[span])))),
      );
      context.fillStyle =
        isShown && state !== "prefill" ? colors.decode[sequence % colors.decode.length] : colors.dim;
      context.fillRect(left, y, width, height);
      if (isShown && state !== "decode") {
        const prefill = Math.min(width, prefillEnd - left);
        context.fillStyle =
          height > 5 && prefill > LEAST_HATCHED ? this.hatching(colors.prefill) : colors.prefill;
        context.fillRect(left, y, prefill, height);
      }
      this.drawEnd(span, left, right, y, height);
      if (height >= LABEL_ROW && width > 26) {
        context.fillStyle = isShown ? colors.onSpan : colors.faint;
        context.font = `${Math.min(12, height - 2)}px system-ui, sans-serif`;
        const most = Math.floor((width - 6) / 6);
        const label = visible(run.label(sequence), 400);
        context.textBaseline = "middle";
        context.fillText(
          label.length > most ? `${label.slice(0, Math.max(1, most - 1))}…` : label,
          Math.max(left, GUTTER) + 3,
          y + height / 2 + 0.5,
        );
      }
    }
  }

  /** Marks how a span ended, by a shape: a notch for a preemption, a cross for a failure. */
  drawEnd(span, left, right, y, height) {
    const { context, colors, run } = this;
    const outcome = run.facts.outcomes[run.spans.outcome[span]];
    if (!FAILURES.includes(outcome) || right - left < 4) return;
    const size = Math.min(5, height / 2, (right - left) / 2);
    const middle = y + height / 2;
    context.strokeStyle = context.fillStyle = colors.mark;
    context.lineWidth = 1.5;
    context.beginPath();
    if (outcome === "preempted") {
      context.moveTo(right - 1, middle - size);
      context.lineTo(right - 1 - size * 1.5, middle);
      context.lineTo(right - 1, middle + size);
      context.fill();
    } else {
      const center = right - size - 2;
      context.moveTo(center - size, middle - size);
      context.lineTo(center + size, middle + size);
      context.moveTo(center + size, middle - size);
      context.lineTo(center - size, middle + size);
      context.stroke();
    }
  }

  hatching(color) {
    if (this.hatched?.color !== color) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 6;
      const context = tile.getContext("2d");
      context.fillStyle = color;
      context.fillRect(0, 0, 6, 6);
      context.strokeStyle = this.colors.hatch;
      context.lineWidth = 1.2;
      for (const shift of [-6, 0, 6]) {
        context.moveTo(shift, 6);
        context.lineTo(shift + 6, 0);
      }
      context.stroke();
      this.hatched = { color, pattern: this.context.createPattern(tile, "repeat") };
    }
    return this.hatched.pattern;
  }

  /** Draws rows whose spans are narrower than pixels, one pixel high each, and then stretched. */
  drawShades(slots) {
    const { shade, context, colors, edges, ratio, rowHeight } = this;
    const width = edges.length - 1;
    shade.width = width;
    shade.height = slots.length;
    const shadeContext = shade.getContext("2d");
    const image = shadeContext.createImageData(width, slots.length);
    const pixels = new Uint32Array(image.data.buffer);
    const blend = blender(colors);
    slots.forEach((slot, row) => this.shadeRow(slot, pixels.subarray(row * width, (row + 1) * width), blend));
    shadeContext.putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    slots.forEach((slot, row) => {
      const gap = rowHeight > 5 ? 1 : 0;
      context.drawImage(
        shade,
        0,
        row,
        width,
        1,
        Math.round(GUTTER * ratio) / ratio,
        slot * rowHeight - this.top,
        width / ratio,
        rowHeight - gap,
      );
    });
  }

  /** Makes a row of pixels, each of the steps between its edge and the next: no object for any. */
  shadeRow(slot, pixels, blend) {
    const { run, view, edges } = this;
    const { starts, ends } = run;
    const { busy, prefill, decode, marks } = view.filtered[view.runs.indexOf(run)];
    const first = run.slotStart[slot];
    const last = run.slotStart[slot + 1];
    let at = Math.max(first, run.placeAt(slot, edges[0]));
    let busyBefore = 0;
    let prefillBefore = 0;
    let decodeBefore = 0;
    let marksBefore = 0;
    for (let i = 0; i <= pixels.length; i++) {
      const edge = edges[i];
      for (let stride = 1; at + 1 < last && starts[at + 1] <= edge;) {
        if (at + stride < last && starts[at + stride] <= edge) {
          at += stride;
          stride *= 2;
        } else stride = 1;
      }
      const steps = ends[at] - starts[at];
      const within = Math.min(Math.max(edge - starts[at], 0), steps);
      const ownPrefill = prefill[at + 1] - prefill[at];
      const ownDecode = decode[at + 1] - decode[at];
      const busyNow = busy[at] + within;
      const prefillNow = prefill[at] + Math.min(within, ownPrefill);
      const decodeNow = decode[at] + Math.max(0, within - steps + ownDecode);
      const marksNow = marks[within >= steps ? at + 1 : at];
      const width = i && edge > edges[i - 1] ? edge - edges[i - 1] : Infinity;
      if (i)
        pixels[i - 1] = blend(
          (busyNow - busyBefore) / width,
          (prefillNow - prefillBefore) / width,
          (decodeNow - decodeBefore) / width,
          marksNow > marksBefore,
        );
      busyBefore = busyNow;
      prefillBefore = prefillNow;
      decodeBefore = decodeNow;
      marksBefore = marksNow;
    }
  }

  drawLanes(x) {
    const { context, run, edges, ratio, colors } = this;
    const first = Math.round(GUTTER * ratio) / ratio;
    this.lanes.forEach((name, number) => {
      const series = run.series[name];
      const most = Math.max(1, name === "slots" ? run.numSlots : series.most);
      const top = this.rowsHeight + number * LANE_HEIGHT + 6;
      const height = LANE_HEIGHT - 8;
      const y = (value) => top + height * (1 - value / most);
      context.fillStyle = colors.lane;
      context.fillRect(GUTTER, top, this.width - GUTTER, height);
      context.fillStyle = colors.laneMost;
      const means = new Path2D();
      for (let i = 0; i + 1 < edges.length; i++) {
        const from = edges[i];
        const to = edges[i + 1];
        const left = first + i / ratio;
        if (to <= from) continue;
        const highest = y(series.largestIn(from, to));
        const mean = y((series.sumTo(to) - series.sumTo(from)) / (to - from));
        context.fillRect(left, highest, 1 / ratio, top + height - highest);
        means.rect(left, mean, 1 / ratio, top + height - mean);
      }
      context.fillStyle = colors.laneMean;
      context.fill(means);
    });
  }

  /** Draws lines through steps that are looked at, and around the spans of the chosen request. */
  drawMarks(x) {
    const { context, view, run, colors, rowHeight } = this;
    const line = (step, color, dash) => {
      const at = x(view.begin(run, step));
      if (at < GUTTER || at > this.width) return;
      context.strokeStyle = color;
      context.setLineDash(dash);
      context.lineWidth = 1.5;
      context.beginPath();
      context.moveTo(at, 0);
      context.lineTo(at, this.height);
      context.stroke();
      context.setLineDash([]);
    };
    for (const { step } of run.facts.restarts) line(step, colors.mark, [2, 3]);
    if (this.marked !== null) line(this.marked, colors.mark, [5, 3]);
    if (view.pointed?.run === run) line(view.pointed.step, colors.faint, [1, 2]);
    const { selected } = view;
    if (selected?.run !== run) return;
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, this.width, this.rowsHeight);
    context.clip();
    context.strokeStyle = colors.chosen;
    context.lineWidth = 2;
    let before = null;
    for (const span of run.spansOf(selected.sequence)) {
      const left = x(view.begin(run, run.spans.start[span]));
      const right = x(view.end(run, run.end(span)));
      const y = run.spans.slot[span] * rowHeight - this.top;
      const middle = y + rowHeight / 2;
      if (before) {
        context.setLineDash([4, 3]);
        context.beginPath();
        context.moveTo(before.right, before.middle);
        context.lineTo(left, middle);
        context.stroke();
        context.setLineDash([]);
      }
      context.strokeRect(left - 1, y - 1, Math.max(3, right - left) + 1, Math.max(4, rowHeight) + 1);
      before = { right, middle };
    }
    context.restore();
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
    this.lanes.forEach((name, number) => {
      const y = this.rowsHeight + number * LANE_HEIGHT + 6;
      const most = name === "slots" ? run.numSlots : run.series[name].most;
      context.fillText(counted(most), GUTTER - 4, y + 6);
      context.textAlign = "left";
      context.strokeStyle = colors.lane;
      context.lineWidth = 4;
      context.lineJoin = "round";
      context.strokeText(LANES[name], GUTTER + 4, y + 8);
      context.fillText(LANES[name], GUTTER + 4, y + 8);
      context.textAlign = "right";
    });
    context.textAlign = "left";
  }
}

/** Returns the colours of the page as it looks now, from its style sheet. */
function colorsOfPage() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    background: color("background"),
    text: color("text"),
    faint: color("faint"),
    decode: [1, 2, 3, 4, 5].map((number) => color(`decode-${number}`)),
    prefill: color("prefill"),
    hatch: color("hatch"),
    dim: color("dim"),
    mark: color("mark"),
    chosen: color("chosen"),
    onSpan: color("on-span"),
    lane: color("lane"),
    laneMost: color("lane-most"),
    laneMean: color("lane-mean"),
  };
}

/** Returns what makes a pixel of the shares of steps: all that are held, and those shown by kind. */
function blender(colors) {
  const rgb = (color) => [d3.rgb(color)].flatMap(({ r, g, b }) => [r, g, b]);
  const [none, dim, prefill, decode, mark] = [
    colors.background,
    colors.dim,
    colors.prefill,
    colors.decode[2],
    colors.mark,
  ].map(rgb);
  const mixed = (part, rest, others, prefills, decodes, failed) => {
    const shade = rest * none[part] + others * dim[part] + prefills * prefill[part] + decodes * decode[part];
    return Math.min(255, shade * (1 - failed) + mark[part] * failed);
  };
  return (busy, prefills, decodes, isMarked) => {
    const others = Math.max(0, busy - prefills - decodes);
    const rest = Math.max(0, 1 - busy);
    const failed = isMarked ? 0.55 : 0;
    const shade = (part) => mixed(part, rest, others, prefills, decodes, failed);
    return ((255 << 24) | (shade(2) << 16) | (shade(1) << 8) | shade(0)) >>> 0; // as memory has it: red first
  };
}
