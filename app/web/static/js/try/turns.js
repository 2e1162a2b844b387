// Turns of a chat: a question and what has arrived of its answer. Pure: no access to the page.

/** @typedef {{ id: string, function: { name: string, arguments: string } }} ToolCall */
/**
 * @typedef {object} Turn
 * @property {string} prompt
 * @property {string} text
 * @property {ToolCall[]} calls
 * @property {'asked' | 'writing' | 'done' | 'stopped' | 'failed'} state
 * @property {import('../api.js').ApiError} [error]
 * @property {string} [finishReason]
 * @property {number} [tokens]
 */

/**
 * Add a part of the answer.
 * @param {Turn} turn
 * @param {any} chunk Object `chat.completion.chunk`.
 * @returns {Turn}
 */
export function addChunk(turn, { choices: [choice], usage }) {
  return {
    ...turn,
    text: turn.text + (choice?.delta.content ?? ''),
    calls: [...turn.calls, ...(choice?.delta.tool_calls ?? [])],
    state: 'writing',
    finishReason: choice?.finish_reason ?? turn.finishReason,
    tokens: usage?.completion_tokens ?? turn.tokens,
  };
}

/**
 * Messages of a request: those of the turns that have an answer, also a part of one, and the next question.
 * @param {string} system
 * @param {Turn[]} turns
 * @param {string} prompt
 */
export function buildMessages(system, turns, prompt) {
  const answered = turns.filter(({ text, calls }) => text || calls.length > 0);
  return [
    ...(system ? [{ role: 'system', content: system }] : []),
    ...answered.flatMap((turn) => {
      const calls = turn.calls.map(({ id, function: called }) => ({ id, type: 'function', function: called }));
      const answer = { role: 'assistant', content: turn.text, ...(calls.length > 0 && { tool_calls: calls }) };
      return [{ role: 'user', content: turn.prompt }, answer];
    }),
    { role: 'user', content: prompt },
  ];
}

/**
 * Split a text into the reasoning that some models write first, and the answer. Some chat templates open the reasoning,
 * so that only its end is in the text.
 * @param {string} text
 */
export function splitReasoning(text) {
  const [, isOpen, rest] = /** @type {RegExpMatchArray} */ (/^\s*(<think>)?(.*)$/s.exec(text));
  const end = rest.indexOf('</think>');
  if (end < 0) return isOpen ? { reasoning: rest.trim(), answer: '' } : { reasoning: '', answer: text };
  return { reasoning: rest.slice(0, end).trim(), answer: rest.slice(end + '</think>'.length).trim() };
}
