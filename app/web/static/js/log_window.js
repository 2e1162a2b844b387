// Log lines that the page holds: a window of rows of the whole log. Pure: no access to the page.

/** @typedef {{ seq: number, ts: string | null, attempt?: number, line: string, stream: string, level: string }} Line */

/** Lines held at most; more are dropped at the end that is out of sight. */
export const MOST_LINES = 20_000;

/** Part of the log, ascending by `seq`, without a gap between its lines. */
export class LogWindow {
  /** @param {number} [most] */
  constructor(most = MOST_LINES) {
    /** Lines held at most. */
    this.most = most;
    /** @type {Line[]} */
    this.lines = [];
    /** True if the log has lines before the first of these. */
    this.hasOlder = false;
    /** True if the newest line of the log is the last of these, so that live lines can be appended. */
    this.isAtEnd = true;
    /** True while lines before the end are being read: live lines then do not push those in sight out of the window. */
    this.isHeld = false;
  }

  get firstSeq() {
    return this.lines[0]?.seq ?? null;
  }

  get lastSeq() {
    return this.lines.at(-1)?.seq ?? 0;
  }

  /**
   * Replace the window.
   * @param {Line[]} lines
   * @param {{ hasOlder: boolean, isAtEnd: boolean }} ends
   */
  reset(lines, { hasOlder, isAtEnd }) {
    this.lines = [...lines];
    this.hasOlder = hasOlder;
    this.isAtEnd = isAtEnd;
  }

  /**
   * Hold at most so many lines from now on, those around one if there are more.
   * @param {number} most
   * @param {number} middle Index of a line to keep.
   */
  setLimit(most, middle) {
    this.most = most;
    if (this.lines.length <= most) return;
    const first = Math.max(0, Math.min(middle - Math.floor(most / 2), this.lines.length - most));
    this.hasOlder ||= first > 0;
    this.isAtEnd &&= first + most >= this.lines.length;
    this.lines = this.lines.slice(first, first + most);
  }

  /**
   * Add lines before the window, read with `before`; returns how many of them are new.
   * @param {Line[]} lines
   * @param {boolean} hasOlder
   */
  prepend(lines, hasOlder) {
    const first = this.firstSeq ?? Infinity;
    const fresh = lines.filter((line) => line.seq < first);
    this.lines = [...fresh, ...this.lines];
    this.hasOlder = hasOlder;
    if (this.lines.length > this.most) {
      this.lines.length = this.most;
      this.isAtEnd = false;
    }
    return fresh.length;
  }

  /**
   * Add lines after the window; those that it has already are left out. Returns how many lines were dropped at its
   * start.
   * @param {Line[]} lines
   */
  append(lines) {
    const last = this.lastSeq;
    for (const line of lines) if (line.seq > last) this.lines.push(line);
    const surplus = this.lines.length - this.most;
    if (surplus <= 0) return 0;
    if (this.isHeld && this.isAtEnd) {
      this.lines.length = this.most;
      this.isAtEnd = false;
      return 0;
    }
    // A tenth more at once: dropping single lines would copy the window for each.
    const dropped = Math.min(this.lines.length, surplus + Math.floor(this.most / 10));
    this.lines.splice(0, dropped);
    this.hasOlder = true;
    return dropped;
  }
}

/**
 * True for a line of a level; `warning` includes errors, and no level includes all.
 * @param {string} level @param {string} minimum
 */
export const hasLevel = (level, minimum) =>
  minimum === '' || level === minimum || (minimum === 'warning' && level === 'error');

/**
 * Rows of a fixed height that are in sight.
 * @param {number} count @param {number} rowHeight
 * @param {number} top Scrolled pixels. @param {number} height Visible pixels.
 * @returns {[number, number]} First row, and the one after the last.
 */
export function computeRowsInSight(count, rowHeight, top, height) {
  const margin = 10;
  const first = Math.max(0, Math.floor(top / rowHeight) - margin);
  return [Math.min(first, count), Math.min(count, Math.ceil((top + height) / rowHeight) + margin)];
}

/**
 * Split a line at the matches of a search; upper and lower case differ, as in the search of the service.
 * @param {string} line @param {string} search
 * @returns {{ text: string, isMatch: boolean }[]}
 */
export function splitAtMatches(line, search) {
  if (!search) return [{ text: line, isMatch: false }];
  return line.split(search).flatMap((text, index) => {
    const unmatched = text === '' ? [] : [{ text, isMatch: false }];
    return index === 0 ? unmatched : [{ text: search, isMatch: true }, ...unmatched];
  });
}
