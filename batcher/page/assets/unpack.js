"use strict";
// What a page holds of a run, from base64 to tables of typed arrays; batcher/page/blocks.py
// packs it and says how.

/** Returns the values and the tables of a run: {name: value, or {rows, column: array or Texts}}. */
async function unpack(base64) {
  const packed = new ReadableStream({
    pull(controller) {
      const end = base64.indexOf("\n", this.at ?? 0);
      if (end < 0) return controller.close();
      controller.enqueue(bytesOf(base64.slice(this.at ?? 0, end)));
      this.at = end + 1;
    },
  });
  const stream = packed.pipeThrough(new DecompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const found = {};
  const tables = {};
  for (let at = 0; at < bytes.length;) {
    const headerEnd = at + 4 + new DataView(bytes.buffer, at).getUint32(0, true);
    const header = JSON.parse(utf8(bytes.subarray(at + 4, headerEnd)));
    const body = bytes.subarray(headerEnd, (at = headerEnd + header.bytes));
    if (header.value) found[header.value] = JSON.parse(utf8(body));
    else (tables[header.table] ??= []).push(columnsOf(header, body));
  }
  for (const [name, blocks] of Object.entries(tables)) found[name] = joined(blocks);
  return found;
}

const decoder = new TextDecoder();
const utf8 = (bytes) => decoder.decode(bytes);

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** Returns the columns of one block by name, and how many rows it has. */
function columnsOf({ rows, columns }, body) {
  const block = { rows };
  let at = 0;
  for (const { name, as, width, bytes } of columns) {
    const numbers = numbersOf(body.subarray(at, (at += rows * width)), rows, width);
    if (as === "text") block[name] = { lengths: numbers, text: utf8(body.subarray(at, (at += bytes))) };
    else if (as === "ascending") block[name] = summedUp(numbers);
    else block[name] = numbers;
  }
  return block;
}

const ARRAYS = { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array, 8: Float64Array };

/** Puts the bytes of numbers together again: first come the lowest ones of all. */
function numbersOf(bytes, rows, width) {
  const numbers = new ARRAYS[width](rows);
  const target = new Uint8Array(numbers.buffer);
  for (let place = 0; place < width; place++)
    for (let row = 0, from = place * rows; row < rows; row++) target[row * width + place] = bytes[from + row];
  return numbers;
}

/** Adds up differences, of which an odd one is negative. */
function summedUp(folded) {
  const numbers = new Uint32Array(folded.length);
  let last = 0;
  for (let i = 0; i < folded.length; i++)
    numbers[i] = last += folded[i] % 2 ? -(folded[i] + 1) / 2 : folded[i] / 2;
  return numbers;
}

/** Texts of a column; all are parts of a few long ones, which is what is searched. */
class Texts {
  constructor(columns) {
    this.first = []; // the number of the first text of each block
    this.blocks = [];
    let rows = 0;
    for (const { lengths, text } of columns) {
      const ends = new Uint32Array(lengths.length);
      let end = 0;
      for (let i = 0; i < lengths.length; i++) ends[i] = end += lengths[i];
      this.first.push(rows);
      this.blocks.push({ ends, text });
      rows += lengths.length;
    }
  }

  at(number) {
    const block = lastUpTo(this.first, number);
    const { ends, text } = this.blocks[block];
    const i = number - this.first[block];
    return text.slice(i ? ends[i - 1] : 0, ends[i]);
  }

  /** Yields the numbers of the texts in which `needle` stands, ascending. */
  *search(needle) {
    for (const [block, { ends, text }] of this.blocks.entries()) {
      for (let at = text.indexOf(needle); at >= 0;) {
        const i = firstAbove(ends, at);
        const end = ends[i];
        if (at + needle.length <= end) {
          yield this.first[block] + i;
          at = text.indexOf(needle, end); // the next text
        } else at = text.indexOf(needle, at + 1); // it reaches into the next text
      }
    }
  }
}

/** Returns one table made of blocks. */
function joined(blocks) {
  const table = { rows: 0 };
  for (const block of blocks) table.rows += block.rows;
  for (const name of Object.keys(blocks[0])) {
    if (name === "rows") continue;
    const parts = blocks.map((block) => block[name]);
    table[name] = parts[0].lengths ? new Texts(parts) : concatenated(parts, table.rows);
  }
  return table;
}

function concatenated(parts, rows) {
  const all = new ARRAYS[Math.max(...parts.map((part) => part.BYTES_PER_ELEMENT))](rows);
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}

/** Returns the index of the last of `ascending` that is at most `value`; -1 if there is none. */
function lastUpTo(ascending, value) {
  return firstAbove(ascending, value) - 1;
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
