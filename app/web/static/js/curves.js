// Points of curves: kept by series, smoothed, and put on a common axis; labels of marks. Pure: no access to the page.

/**
 * Points of one series.
 * @typedef {object} Series
 * @property {number[]} steps Ascending.
 * @property {(number | null)[]} values Null for a value that was not finite.
 */

/**
 * Times of some steps, in seconds since the run first started.
 * @typedef {{ steps: number[], seconds: number[] }} Clock
 */

/** @typedef {'step' | 'epoch' | 'time'} Axis */

/** @returns {Series} */
export const createSeries = () => ({ steps: [], values: [] });

/**
 * Append a point. A step that is not after the last one was trained again, after a rewind or by a new attempt: the
 * points from there on are of the earlier pass and are dropped.
 * @param {Series} series
 * @param {number} step
 * @param {number | null} value
 */
export function appendPoint(series, step, value) {
  const { steps } = series;
  if (steps.length > 0 && step <= steps[steps.length - 1]) truncateFrom(series, step);
  steps.push(step);
  series.values.push(value);
}

/**
 * Drop the points from a step on.
 * @param {Series} series
 * @param {number} step
 */
export function truncateFrom(series, step) {
  const index = findLowerBound(series.steps, step);
  series.steps.length = index;
  series.values.length = index;
}

/**
 * A thinned series with all the detail that was read of a part of it. Points after the newest of the detail stay: they
 * came later.
 * @param {Series} series
 * @param {Series} detail
 * @returns {Series}
 */
export function insertDetail(series, detail) {
  if (detail.steps.length === 0) return series;
  const before = findLowerBound(series.steps, detail.steps[0]);
  const after = findLowerBound(series.steps, detail.steps[detail.steps.length - 1] + 1);
  const replacePart = (/** @type {any[]} */ points, /** @type {any[]} */ part) => [
    ...points.slice(0, before),
    ...part,
    ...points.slice(after),
  ];
  return { steps: replacePart(series.steps, detail.steps), values: replacePart(series.values, detail.values) };
}

/**
 * First and last step of the points whose positions are in a range; null if there are none.
 * @param {Series} series
 * @param {(number | null)[]} positions Positions of its points.
 * @param {[number, number]} range
 * @returns {[number, number] | null}
 */
export function findStepsWithin(series, positions, [low, high]) {
  const isWithin = (/** @type {number | null} */ position) => position != null && position >= low && position <= high;
  const first = positions.findIndex(isWithin);
  return first < 0 ? null : [series.steps[first], series.steps[positions.findLastIndex(isWithin)]];
}

/**
 * Index of the first of ascending numbers that is not smaller.
 * @param {ArrayLike<number>} numbers
 * @param {number} number
 */
export function findLowerBound(numbers, number) {
  let low = 0;
  let high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < number) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * Exponential moving average, corrected for its start: the first value equals the first point.
 * @param {(number | null)[]} values
 * @param {number} weight Of the average so far, from 0 (no smoothing) to below 1.
 * @returns {(number | null)[]}
 */
export function smoothValues(values, weight) {
  if (weight <= 0) return values;
  let average = 0;
  let norm = 0;
  return values.map((value) => {
    if (value == null) return null;
    average = average * weight + value * (1 - weight);
    norm = norm * weight + (1 - weight);
    return average / norm;
  });
}

/**
 * Means per step of a series whose values are sums over the steps since the metric before. A thinned series may lack
 * that metric, and an attempt that starts between two metrics has fewer steps in its first one.
 * @param {Series} sums
 * @param {number} every Steps between two metrics; 0: only the last step has one.
 * @param {number[]} starts Steps from which attempts trained.
 * @returns {(number | null)[]}
 */
export function divideBySteps({ steps, values }, every, starts) {
  return values.map((sum, index) => {
    const step = steps[index];
    const logged = every > 0 ? Math.floor((step - 1) / every) * every : 0;
    return sum && sum / (step - Math.max(logged, steps[index - 1] ?? 0, ...starts.filter((start) => start < step)));
  });
}

/**
 * Positions of the points of a series on an axis.
 * @param {Series} series
 * @param {Axis} axis
 * @param {{ epoch: Series | undefined, clock: Clock }} scales
 * @returns {(number | null)[]}
 */
export function computePositions(series, axis, { epoch, clock }) {
  if (axis === 'epoch') return interpolate(epoch?.steps ?? [], epoch?.values ?? [], series.steps);
  if (axis === 'time') return interpolate(clock.steps, clock.seconds, series.steps);
  return series.steps;
}

/**
 * Values between known points, linearly; before the first and after the last, the nearest two continue.
 * @param {number[]} knownPositions Ascending. @param {(number | null)[]} knownValues @param {number[]} positions
 * @returns {(number | null)[]} Null where fewer than two points are known.
 */
export function interpolate(knownPositions, knownValues, positions) {
  if (knownPositions.length === 1)
    return positions.map((position) => (position === knownPositions[0] ? knownValues[0] : null));
  if (knownPositions.length < 2) return positions.map(() => null);
  return positions.map((position) => {
    const right = Math.min(Math.max(findLowerBound(knownPositions, position), 1), knownPositions.length - 1);
    const [low, high] = [knownValues[right - 1], knownValues[right]];
    if (low == null || high == null) return null;
    return (
      low +
      ((high - low) * (position - knownPositions[right - 1])) / (knownPositions[right] - knownPositions[right - 1])
    );
  });
}

/**
 * Put several curves on one ascending axis; null where a curve has no point.
 * @param {{ x: (number | null)[], y: (number | null)[] }[]} curves
 * @returns {{ x: number[], ys: (number | null | undefined)[][] }}
 */
export function alignCurves(curves) {
  if (curves.length === 1 && isAscending(curves[0].x)) {
    return { x: /** @type {number[]} */ (curves[0].x), ys: [curves[0].y] };
  }
  const allPositions = new Set();
  for (const { x } of curves) for (const position of x) if (position != null) allPositions.add(position);
  const merged = /** @type {number[]} */ ([...allPositions]).sort((left, right) => left - right);
  const indexes = new Map(merged.map((position, index) => [position, index]));
  const ys = curves.map(({ x, y }) => {
    /** @type {(number | null | undefined)[]} */
    const column = Array.from({ length: merged.length });
    x.forEach((position, index) => {
      if (position != null) column[/** @type {number} */ (indexes.get(position))] = y[index];
    });
    return column;
  });
  return { x: merged, ys };
}

/**
 * Range of all positions of some curves, which ascend; null if they have none, or all the same.
 * @param {(number | null)[][]} curves
 * @returns {[number, number] | null}
 */
export function computeExtent(curves) {
  let [low, high] = [Infinity, -Infinity];
  for (const positions of curves) {
    const first = positions.find((position) => position != null);
    const last = findLastValue(positions);
    if (first == null || last == null) continue;
    low = Math.min(low, first);
    high = Math.max(high, last);
  }
  return low < high ? [low, high] : null;
}

/**
 * Lines for the labels of marks, so that no label covers another: left of its mark where it would leave the chart. A
 * label without a free line is left out.
 * @template {{ left: number, width: number }} Label
 * @param {Label[]} labels By the position of their mark, from left to right.
 * @param {number} right Right end of the chart.
 * @param {number} lineCount
 * @returns {(Label & { start: number, line: number })[]}
 */
export function placeLabels(labels, right, lineCount) {
  const lineEnds = Array.from({ length: lineCount }, () => -Infinity);
  return labels.flatMap((label) => {
    const start = label.left + label.width < right ? label.left : label.left - label.width;
    const line = lineEnds.findIndex((end) => start >= end);
    if (line < 0) return [];
    lineEnds[line] = start + label.width;
    return [{ ...label, start, line }];
  });
}

/** @param {(number | null)[]} numbers */
function isAscending(numbers) {
  let last = -Infinity;
  for (const number of numbers) {
    if (number == null || number <= last) return false;
    last = number;
  }
  return true;
}

/**
 * Last value that is not null.
 * @param {ArrayLike<number | null | undefined>} values
 * @param {number} [from] Index to search backward from.
 */
export function findLastValue(values, from = values.length - 1) {
  for (let index = Math.min(from, values.length - 1); index >= 0; index -= 1) {
    const value = values[index];
    if (value != null) return value;
  }
  return null;
}
