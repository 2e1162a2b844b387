import assert from 'node:assert/strict';
import test from 'node:test';
import {
  alignCurves,
  appendPoint,
  createSeries,
  computeExtent,
  interpolate,
  findLastValue,
  findLowerBound,
  divideBySteps,
  computePositions,
  smoothValues,
  findStepsWithin,
  placeLabels,
  truncateFrom,
  insertDetail,
} from '../../../../app/web/static/js/curves.js';

test('a step that is trained again drops the points of the earlier pass from there on', () => {
  const series = createSeries();
  for (const step of [1, 2, 3, 4]) appendPoint(series, step, step);
  appendPoint(series, 3, 30);
  assert.deepEqual(series, { steps: [1, 2, 3], values: [1, 2, 30] });
  truncateFrom(series, 0);
  assert.deepEqual(series, createSeries());
});

test('smoothing begins at the first point and passes over gaps', () => {
  assert.deepEqual(
    smoothValues([4, 4, 4], 0.9).map((value) => Number(value.toFixed(9))),
    [4, 4, 4],
  );
  assert.equal(smoothValues([4, null, 8], 0.5)[1], null);
  assert.ok(Math.abs(smoothValues([4, null, 8], 0.5)[2] - 20 / 3) < 1e-12);
  assert.deepEqual(smoothValues([1, 2], 0), [1, 2]);
});

test('curves are put on one ascending axis', () => {
  const both = alignCurves([
    { x: [1, 2, 4], y: [10, 20, 40] },
    { x: [2, 3], y: [5, null] },
  ]);
  assert.deepEqual(both.x, [1, 2, 3, 4]);
  assert.deepEqual([...both.ys[0]], [10, 20, undefined, 40]);
  assert.deepEqual([...both.ys[1]], [undefined, 5, null, undefined]);
  assert.deepEqual(alignCurves([]), { x: [], ys: [] });
});

test('sums since the metric before become means per step', () => {
  const mean = (steps, every, starts = [0]) => divideBySteps({ steps, values: steps.map(() => 12) }, every, starts);
  assert.deepEqual(mean([4, 8, 10], 4), [3, 3, 6], 'the last step is logged too');
  assert.deepEqual(mean([8, 16, 18], 4), [3, 3, 6], 'others between them were thinned away');
  assert.deepEqual(mean([8, 12], 4, [0, 5]), [4, 3], 'an attempt from step 5 on');
  assert.deepEqual(mean([24], 0, [12]), [1], 'only the last step is logged');
  assert.deepEqual(divideBySteps({ steps: [4, 8], values: [null, 0] }, 4, [0]), [null, 0]);
});

test('positions between known times follow the line through the nearest two', () => {
  assert.deepEqual(interpolate([10, 20], [100, 200], [10, 15, 25]), [100, 150, 250]);
  assert.deepEqual(interpolate([], [], [1]), [null]);
  assert.deepEqual(interpolate([5], [7], [5, 6]), [7, null]);
  const scales = { epoch: { steps: [1, 3], values: [0.5, 1.5] }, clock: { steps: [1, 3], seconds: [10, 30] } };
  const series = { steps: [1, 2], values: [9, 8] };
  assert.deepEqual(computePositions(series, 'step', scales), [1, 2]);
  assert.deepEqual(computePositions(series, 'epoch', scales), [0.5, 1]);
  assert.deepEqual(computePositions(series, 'time', scales), [10, 20]);
});

test('places and last values', () => {
  assert.equal(findLowerBound([1, 3, 5], 4), 2);
  assert.equal(findLowerBound([], 4), 0);
  assert.equal(findLastValue([1, 2, null, undefined]), 2);
  assert.equal(findLastValue([]), null);
});

test('detail takes the place of the thinned points, and later points stay', () => {
  const thinned = { steps: [1, 5, 9, 13], values: [10, 50, 90, 130] };
  const detail = { steps: [5, 6, 7, 8, 9], values: [50, 60, 70, 80, 90] };
  assert.deepEqual(insertDetail(thinned, detail), {
    steps: [1, 5, 6, 7, 8, 9, 13],
    values: [10, 50, 60, 70, 80, 90, 130],
  });
  assert.equal(insertDetail(thinned, { steps: [], values: [] }), thinned);
  assert.deepEqual(findStepsWithin(thinned, [0.1, 0.5, null, 1.3], [0.4, 1.4]), [5, 13]);
  assert.equal(findStepsWithin(thinned, [0.1, 0.5, 0.9, 1.3], [2, 3]), null);
});

test('charts of a page have the range of all curves, and none without two positions', () => {
  assert.deepEqual(
    computeExtent([
      [1, 2, 60],
      [10, 50],
      [null, 5, null],
    ]),
    [1, 60],
  );
  assert.equal(computeExtent([[3], [null], []]), null);
});

test('labels of marks cover neither each other nor the right edge, and one without a free line is left out', () => {
  const labels = [0, 40, 60, 110, 980, 990].map((left) => ({ left, width: 100 }));
  const placed = placeLabels(labels, 1000, 2);
  assert.deepEqual(
    placed.map(({ left, start, line }) => [left, start, line]),
    [
      [0, 0, 0],
      [40, 40, 1],
      [110, 110, 0],
      [980, 880, 0],
      [990, 890, 1],
    ],
  );
});
