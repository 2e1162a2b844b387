import assert from 'node:assert/strict';
import test from 'node:test';
import { separateMarks } from '../../../../app/web/static/js/run/timeline.js';

test('marks do not lie over each other, and the best of them is shown', () => {
  const mark = (kind, at) => ({ kind, at, about: `${kind} at ${at}` });
  const shown = separateMarks(
    [mark('checkpoint', 0), mark('checkpoint', 5), mark('best', 8), mark('checkpoint', 40), mark('lost', 100)],
    10,
  );
  assert.deepEqual(
    shown.map(({ kind, at }) => [kind, at]),
    [
      ['best', 8],
      ['lost', 100],
      ['checkpoint', 40],
    ],
  );
  assert.equal(shown[0].about, 'best at 8, and 2 more beside it');
});
