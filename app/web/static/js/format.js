// Numbers, times and names as text. Pure: no access to the page.

const UNITS = ['B', 'KB', 'MB', 'GB', 'TB'];

/** @param {number | null | undefined} value */
export function integer(value) {
  return value == null ? '–' : Math.round(value).toLocaleString('en-US');
}

/** @param {number | null | undefined} value Loss in nats. */
export function loss(value) {
  if (value == null || !Number.isFinite(value)) return '–';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2).replace('e+', 'e');
  return value.toFixed(size < 10 ? 3 : 2);
}

/** @param {number | null | undefined} value A number of any size, with four significant digits. */
export function significant(value) {
  if (value == null || !Number.isFinite(value)) return '–';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace('e+', 'e');
  return size >= 1000 ? Math.round(value).toLocaleString('en-US') : String(Number(value.toPrecision(4)));
}

/** @param {number | null | undefined} length Seconds. */
export function duration(length) {
  if (length == null || !Number.isFinite(length)) return '–';
  const rounded = Math.max(0, Math.round(length));
  const days = Math.floor(rounded / 86400);
  const hours = Math.floor((rounded % 86400) / 3600);
  const minutes = Math.floor((rounded % 3600) / 60);
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${String(minutes).padStart(2, '0')} min`;
  if (minutes >= 10) return `${minutes} min`;
  if (minutes) return rounded % 60 ? `${minutes} min ${rounded % 60} s` : `${minutes} min`;
  return `${rounded} s`;
}

/**
 * @param {string | null | undefined} time RFC 3339.
 * @param {number} now Milliseconds since 1970.
 */
export function ago(time, now) {
  if (!time) return '–';
  const age = (now - Date.parse(time)) / 1000;
  if (age < 10) return 'just now';
  if (age < 3600) return `${duration(age < 60 ? age : Math.floor(age / 60) * 60)} ago`;
  if (age < 86400) return `${Math.floor(age / 3600)} h ago`;
  return `${Math.floor(age / 86400)} d ago`;
}

/**
 * Time of day; with the date unless it is today's.
 * @param {string | number | null | undefined} time RFC 3339, or milliseconds since 1970.
 * @param {number} [now] Milliseconds since 1970.
 */
export function clock(time, now = Date.now()) {
  if (time == null) return '–';
  const date = new Date(time);
  const text = date.toLocaleTimeString('en-GB', { hour: '2-digit', minute: '2-digit' });
  if (date.toDateString() === new Date(now).toDateString()) return text;
  return `${date.toLocaleDateString('en-GB', { day: 'numeric', month: 'short' })}, ${text}`;
}

/** @param {string | number | null | undefined} time Time of day in seconds, for log lines. */
export function seconds(time) {
  return time == null ? '' : new Date(time).toLocaleTimeString('en-GB');
}

/** @param {number | null | undefined} count */
export function bytes(count) {
  if (count == null) return '–';
  let value = count;
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${UNITS[unit]}`;
}

/** @param {number | null | undefined} mib */
export function gib(mib) {
  return mib == null ? '–' : (mib / 1024).toFixed(1);
}

/** @param {number | null | undefined} mib Memory, in the unit in which it has digits to read. */
export function mebibytes(mib) {
  if (mib == null) return '–';
  return mib >= 1024 ? `${gib(mib)} GiB` : mib >= 10 ? `${Math.round(mib)} MiB` : `${Number(mib.toPrecision(2))} MiB`;
}

/** @param {number} part @param {number} whole */
export function percent(part, whole) {
  return whole > 0 ? `${Math.floor((100 * part) / whole)} %` : '0 %';
}

/** @param {string} id Shortened to the prefix of its kind and its last characters, which differ. */
export function shortId(id) {
  const kind = id.indexOf('_') + 1;
  return id.length > kind + 10 ? `${id.slice(0, kind)}…${id.slice(-6)}` : id;
}

/** @param {unknown} value A configuration value. */
export function configValue(value) {
  if (value == null) return 'none';
  return typeof value === 'object' ? JSON.stringify(value) : String(value);
}

/**
 * @param {number} count
 * @param {string} noun Singular; its plural ends in `s`.
 */
export function counted(count, noun) {
  return `${integer(count)} ${noun}${count === 1 ? '' : 's'}`;
}

/**
 * Labels of the ticks of an axis, with as many digits as tell them apart.
 * @param {(number | null)[]} values
 * @returns {string[]}
 */
export function tickLabels(values) {
  const numbers = /** @type {number[]} */ (values.filter((value) => value != null));
  const size = Math.max(...numbers.map(Math.abs), 0);
  const gaps = numbers
    .slice(1)
    .map((value, index) => Math.abs(value - numbers[index]))
    .filter((gap) => gap > 0);
  const gap = Math.min(...gaps, size || 1);
  /** @param {(digits: number) => (value: number) => number} rounding */
  const digitsOf = (rounding) => {
    for (let digits = 0; digits < 8; digits += 1)
      if (numbers.every((value) => Math.abs(rounding(digits)(value) - value) < gap / 100)) return digits;
    return 8;
  };
  if (size >= 1e4) {
    const digits = digitsOf((count) => (value) => Number((value / 1000).toFixed(count)) * 1000);
    return values.map((value) => (value == null ? '' : value === 0 ? '0' : `${(value / 1000).toFixed(digits)}k`));
  }
  if (size < 1e-3) {
    const digits = digitsOf((count) => (value) => Number(value.toExponential(count)));
    return values.map((value) => (value == null ? '' : value === 0 ? '0' : value.toExponential(digits)));
  }
  const digits = digitsOf((count) => (value) => Number(value.toFixed(count)));
  return values.map((value) => (value == null ? '' : value.toFixed(digits)));
}

/**
 * Progress of an upload.
 * @param {number} sent Bytes.
 * @param {number} total Bytes.
 * @param {number} elapsed Seconds since the start.
 */
export function transfer(sent, total, elapsed) {
  if (sent >= total) return `${bytes(total)} sent; the service checks the rows …`;
  const rate = elapsed > 0.5 ? sent / elapsed : 0;
  const left = rate > 0 ? ` · ${bytes(rate)}/s · ${duration((total - sent) / rate)} left` : '';
  return `${bytes(sent)} of ${bytes(total)}${left}`;
}
