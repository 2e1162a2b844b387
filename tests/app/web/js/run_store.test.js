import assert from 'node:assert/strict';
import test from 'node:test';

// What the modules use of a browser.
const streams = [];
globalThis.document = Object.assign(new EventTarget(), { hidden: false });
globalThis.requestAnimationFrame = (callback) => setTimeout(callback, 0);
globalThis.cancelAnimationFrame = clearTimeout;
globalThis.EventSource = class extends EventTarget {
  static CLOSED = 2;

  constructor(url) {
    super();
    Object.assign(this, { url, readyState: 1 });
    streams.push(this);
    queueMicrotask(() => this.onopen?.());
  }

  /** Send an event of the run. */
  send(type, seq, fields) {
    this.dispatchEvent(new MessageEvent(type, { data: JSON.stringify({ seq, ...fields }), lastEventId: String(seq) }));
  }

  close() {
    this.readyState = 2;
  }
};

const { connection } = await import('../../../../app/web/static/js/stream.js');
const { RunStore } = await import('../../../../app/web/static/js/run_store.js');
const { get } = await import('../../../../app/web/static/js/api.js');

const json = (body, status = 200) =>
  new Response(JSON.stringify(body), { status, headers: { 'content-type': 'application/json' } });
const RUN = { id: 'run_1', status: 'running', last_seq: 10, started_at: '2026-01-02T03:04:05Z' };

/** A service whose responses are made by `answers`, by the end of the path; each may be replaced during a test. */
function service(more = {}) {
  const answers = {
    run_1: () => json(RUN),
    metrics: () =>
      json({ series: { loss: { steps: [1, 2], values: [3, 2] } }, clock: { steps: [], seconds: [] }, last_seq: 10 }),
    lines: () => json({ data: [{ seq: 9, line: 'a', level: 'info' }], has_more: false }),
    history: () => json({ data: [], has_more: false }),
    checkpoints: () => json({ data: [] }),
    actions: () => json({ data: [] }),
    attempts: () => json({ data: [] }),
    ...more,
  };
  const requests = [];
  globalThis.fetch = async (url) => {
    requests.push(url);
    return answers[url.split('?')[0].split('/').at(-1)](url);
  };
  return { answers, requests };
}

const until = async (isTrue, what) => {
  for (const end = Date.now() + 10_000; !isTrue(); await new Promise((resolve) => setTimeout(resolve, 5)))
    assert.ok(Date.now() < end, what);
};
const lines = (store) => store.log.lines.map((line) => line.line);

test('a part that cannot be read says so, and is read once the service answers', async () => {
  const { answers } = service({ metrics: () => json({ detail: 'It failed.' }, 500) });
  const store = new RunStore('run_1');
  const opened = store.open();
  await until(() => store.failures.value.curves, 'the failure is shown');
  assert.deepEqual(lines(store), ['a'], 'the other parts are shown');
  streams.at(-1).send('metric', 11, { step: 3, loss: 1 });
  answers.metrics = () =>
    json({
      series: { loss: { steps: [1, 2, 3], values: [3, 2, 1] } },
      clock: { steps: [], seconds: [] },
      last_seq: 11,
    });
  await opened;
  assert.deepEqual(store.failures.value, {});
  assert.deepEqual(store.series.get('loss'), { steps: [1, 2, 3], values: [3, 2, 1] });
  streams.at(-1).send('metric', 12, { step: 4, loss: 0.5 });
  await until(() => store.series.get('loss').steps.length === 4, 'live points follow');
  store.close();
});

test('events that arrive while a part is read are added once', async () => {
  let answer;
  const { answers } = service();
  answers.lines = () => new Promise((resolve) => (answer = resolve));
  const store = new RunStore('run_1');
  const opened = store.open();
  await until(() => answer && streams.length > 0, 'the log is being read');
  streams.at(-1).send('log', 11, { line: 'b', level: 'info' });
  streams.at(-1).send('log', 12, { line: 'c', level: 'info' });
  await until(() => store.parts.log.waiting?.length === 2, 'they wait');
  answer(
    json({
      data: [
        { seq: 9, line: 'a', level: 'info' },
        { seq: 11, line: 'b', level: 'info' },
      ],
      has_more: false,
    }),
  );
  await opened;
  assert.deepEqual(lines(store), ['a', 'b', 'c']);
  store.close();
});

test('after a rewind no point of the earlier pass is left', async () => {
  service();
  const store = new RunStore('run_1');
  await store.open();
  const stream = streams.at(-1);
  for (const step of [3, 4, 5, 6]) stream.send('metric', 8 + step, { step, loss: 1, extra: { reward: step } });
  stream.send('eval', 15, { step: 4, metrics: { eval_loss: 2 } });
  stream.send('eval', 16, { step: 6, metrics: { eval_loss: 1 } });
  stream.send('metric', 17, { step: 4, loss: 9 });
  await until(() => store.series.get('loss').values.at(-1) === 9, 'the second pass is shown');
  assert.deepEqual(store.series.get('loss').steps, [1, 2, 3, 4]);
  assert.deepEqual(store.series.get('extra.reward').steps, [3]);
  assert.deepEqual(store.series.get('eval.eval_loss').steps, [4], 'an evaluation of the same step is valid');
  store.close();
});

test('a log of one level shows live lines of that level only', async () => {
  const { requests } = service();
  const store = new RunStore('run_1');
  await store.open();
  await store.readLog('warning');
  assert.ok(requests.at(-1).includes('level=warning'));
  for (const [seq, level] of [
    [11, 'info'],
    [12, 'warning'],
    [13, 'error'],
  ])
    streams.at(-1).send('log', seq, { line: level, level });
  await until(() => store.log.lines.length === 3, 'lines arrive');
  assert.deepEqual(lines(store), ['a', 'warning', 'error']);
  store.close();
});

test('the state of the connection ends with the page of the run', async () => {
  service({ run_1: () => json({ ...RUN, status: 'completed' }) });
  const store = new RunStore('run_1');
  await store.open();
  assert.equal(connection.value, 'ended');
  store.close();
  assert.equal(connection.value, 'off');
});

test('a body that breaks off is a failure to reach the service', async () => {
  globalThis.fetch = async () => new Response('{"data": [', { headers: { 'content-type': 'application/json' } });
  await assert.rejects(get('/v1/runs'), (error) => error.isTemporary && /cannot be reached/.test(error.message));
});
