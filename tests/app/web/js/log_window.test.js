import assert from 'node:assert/strict';
import test from 'node:test';
import { LogWindow, splitAtMatches, computeRowsInSight } from '../../../../app/web/static/js/log_window.js';

const lines = (from, to) =>
  Array.from({ length: to - from + 1 }, (_, index) => ({ seq: from + index, line: `line ${from + index}` }));
const seqs = (window) => window.lines.map((line) => line.seq);

test('lines that come twice are held once', () => {
  const window = new LogWindow();
  window.reset(lines(11, 20), { hasOlder: true, isAtEnd: true });
  window.append(lines(18, 25));
  assert.equal(window.prepend(lines(1, 12), false), 10);
  assert.deepEqual(
    seqs(window),
    lines(1, 25).map((line) => line.seq),
  );
  assert.equal(window.hasOlder, false);
});

test('a full window drops the end that is out of sight and says so', () => {
  const window = new LogWindow(100);
  window.reset(lines(1, 100), { hasOlder: false, isAtEnd: true });
  assert.equal(window.append(lines(101, 101)), 11);
  assert.deepEqual([window.firstSeq, window.lastSeq, window.hasOlder], [12, 101, true]);
  window.prepend(lines(1, 11), false);
  assert.deepEqual([window.firstSeq, window.lastSeq, window.isAtEnd], [1, 100, false]);
});

test('live lines do not push those in sight out of a full window', () => {
  const window = new LogWindow(100);
  window.reset(lines(1, 99), { hasOlder: false, isAtEnd: true });
  window.isHeld = true;
  assert.equal(window.append(lines(100, 105)), 0);
  assert.deepEqual([window.firstSeq, window.lastSeq, window.isAtEnd], [1, 100, false]);
});

test('rows in sight are those of the view and a few around it', () => {
  assert.deepEqual(computeRowsInSight(1000, 18, 1800, 180), [90, 120]);
  assert.deepEqual(computeRowsInSight(5, 18, 0, 180), [0, 5]);
  assert.deepEqual(computeRowsInSight(0, 18, 500, 180), [0, 0]);
});

test('matches of a search are told apart', () => {
  const parts = (line, search) =>
    splitAtMatches(line, search)
      .map((part) => (part.isMatch ? `[${part.text}]` : part.text))
      .join('');
  assert.equal(parts('loss 1 loss', 'loss'), '[loss] 1 [loss]');
  assert.equal(parts('Loss', 'loss'), 'Loss');
  assert.equal(parts('a.b', '.'), 'a[.]b');
  assert.equal(parts('', 'x'), '');
});
