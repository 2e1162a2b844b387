import assert from 'node:assert/strict';
import test from 'node:test';
import * as format from '../../../../app/web/static/js/format.js';

test('ticks have as many digits as tell them apart', () => {
  assert.deepEqual(format.tickLabels([1.25, 1.5]), ['1.25', '1.50']);
  assert.deepEqual(format.tickLabels([0, 5e-5, 1e-4]), ['0', '5e-5', '1e-4']);
  assert.deepEqual(format.tickLabels([0.00019925, 0.0001995]), ['1.9925e-4', '1.9950e-4']);
  assert.deepEqual(format.tickLabels([10000, 25000]), ['10k', '25k']);
  assert.deepEqual(format.tickLabels([null, 1, 10]), ['', '1', '10']);
});

test('durations, sizes and numbers', () => {
  assert.deepEqual([0, 59, 61, 3600, 90061, null].map(format.duration), [
    '0 s',
    '59 s',
    '1 min 1 s',
    '1 h 00 min',
    '1 d 1 h',
    '–',
  ]);
  assert.deepEqual([999, 1500, 2.5e9].map(format.bytes), ['999 B', '1.5 KB', '2.5 GB']);
  assert.deepEqual([0, 1.23456, 12.3456, 5e-7, null].map(format.loss), ['0.000', '1.235', '12.35', '5.00e-7', '–']);
  assert.deepEqual(
    [1, 2].map((count) => format.counted(count, 'run')),
    ['1 run', '2 runs'],
  );
  assert.equal(format.percent(199, 200), '99 %', 'not done is never 100 %');
  assert.equal(format.shortId('run_01m84wwqfr3kybzr2j2bm1zf9w'), 'run_…m1zf9w');
});

test('times are relative to now', () => {
  const now = Date.parse('2026-01-02T03:04:05Z');
  assert.equal(format.ago('2026-01-02T03:04:00Z', now), 'just now');
  assert.equal(format.ago('2026-01-02T02:03:05Z', now), '1 h ago');
  assert.equal(format.ago(null, now), '–');
});

test('an upload says how much is left, and what the service does at its end', () => {
  assert.equal(format.transfer(0, 2e6, 0.1), '0 B of 2.0 MB');
  assert.equal(format.transfer(1e6, 4e6, 2), '1.0 MB of 4.0 MB · 500 KB/s · 6 s left');
  assert.equal(format.transfer(4e6, 4e6, 8), '4.0 MB sent; the service checks the rows …');
});

test('memory has the unit in which it has digits to read', () => {
  assert.deepEqual([0.0312, 3.25, 700.4, 23_552].map(format.mebibytes), [
    '0.031 MiB',
    '3.3 MiB',
    '700 MiB',
    '23.0 GiB',
  ]);
  assert.equal(format.mebibytes(null), '–');
});
