import assert from 'node:assert/strict';
import test from 'node:test';
import { addChunk, buildMessages, splitReasoning } from '../../../../app/web/static/js/try/turns.js';

/** @param {object} delta @param {object} [more] */
const chunkOf = (delta, more) => ({ choices: [{ index: 0, delta, ...more }] });
const EMPTY = /** @type {const} */ ({ prompt: 'a', text: '', calls: [], state: 'asked' });

test('an answer grows by its parts and keeps its calls, its end and its size', () => {
  const call = { index: 0, id: 'call_1', type: 'function', function: { name: 'add', arguments: '{}' } };
  const chunks = [
    chunkOf({ role: 'assistant', content: 'Hel' }),
    chunkOf({ content: 'lo', tool_calls: [call] }, { finish_reason: 'tool_calls' }),
    { choices: [], usage: { completion_tokens: 7 } },
  ];
  const turn = chunks.reduce(addChunk, EMPTY);
  assert.deepEqual([turn.text, turn.finishReason, turn.tokens, turn.state], ['Hello', 'tool_calls', 7, 'writing']);
  const [, , answer] = buildMessages('Be brief.', [turn], 'b');
  assert.deepEqual(answer, {
    role: 'assistant',
    content: 'Hello',
    tool_calls: [{ id: 'call_1', type: 'function', function: call.function }],
  });
});

test('messages have what was answered, also in part, and no question without an answer', () => {
  const stopped = { ...EMPTY, text: 'x', state: /** @type {const} */ ('stopped') };
  assert.deepEqual(buildMessages('', [EMPTY, stopped], 'b'), [
    { role: 'user', content: 'a' },
    { role: 'assistant', content: 'x' },
    { role: 'user', content: 'b' },
  ]);
});

test('reasoning is told apart from the answer, also while it is written and if the template has opened it', () => {
  assert.deepEqual(splitReasoning('<think>\nHm.\n</think>\n\nYes.'), { reasoning: 'Hm.', answer: 'Yes.' });
  assert.deepEqual(splitReasoning('Hm.\n</think>\nYes.'), { reasoning: 'Hm.', answer: 'Yes.' });
  assert.deepEqual(splitReasoning('\n<think>Hm'), { reasoning: 'Hm', answer: '' });
  assert.deepEqual(splitReasoning('  1 <think>'), { reasoning: '', answer: '  1 <think>' });
});
