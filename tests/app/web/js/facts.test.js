import assert from 'node:assert/strict';
import test from 'node:test';
import { collectFacts, describePlans } from '../../../../app/web/static/js/run/facts.js';

const GIB = 2 ** 30;
const PLAN = {
  batch_size: 2,
  gradient_accumulation_steps: 2,
  recomputed_layers: 10,
  layers: 36,
  fits: true,
  needed_bytes: 41.2 * GIB,
  usable_bytes: 70.7 * GIB,
  step_seconds: 1.4567,
  alternatives: [
    { rows: 4, recomputed: 30, needed_bytes: 68.4 * GIB, step_seconds: 1.61 },
    { rows: 1, recomputed: 0, needed_bytes: 38 * GIB, step_seconds: 1.9 },
  ],
};

/** @param {object} facts @param {object | null} [effective] */
const shown = (facts, effective = null) => Object.fromEntries(collectFacts({ facts, effective_config: effective }));

test('facts name what computes each part, and only parts that the trainer reported', () => {
  assert.deepEqual(collectFacts({ facts: null, effective_config: null }), []);
  assert.deepEqual(shown({ device: 'cpu', attention: 'sdpa' }), { Device: 'cpu', Kernels: 'attention sdpa' });
  const cudnn = 'varlen (cudnn for texts of 4096 tokens)';
  assert.deepEqual(shown({ attention: 'varlen', kernels: { attention: cudnn } }), { Kernels: `attention ${cudnn}` });
  const kernels = { norms: 'liger-kernel 0.8.5', lora: 'fused', dropout: 'Triton', head: 'two products' };
  assert.deepEqual(
    shown({
      device: 'cuda',
      device_name: 'NVIDIA H100',
      attention: 'varlen',
      kernels,
      parameters_total: 8e9,
      parameters_trainable: 4e7,
      compile_seconds: 93.21,
    }),
    {
      Device: 'NVIDIA H100',
      Kernels: 'attention varlen, norms liger-kernel 0.8.5, adapters fused, dropout Triton, loss head two products',
      Parameters: '40,000,000 of 8,000,000,000 trained',
      Compilation: '93.21 s before the first step',
    },
  );
});

test('the precision is that of the computation and of the weights', () => {
  const precision = (/** @type {object} */ effective) => shown({}, effective).Precision;
  assert.equal(precision({ dtype: null }), undefined);
  assert.equal(
    precision({ dtype: 'bfloat16', load_in_4bit: true, bnb_4bit_quant_type: 'nf4', lora_r: 16 }),
    'computes in bfloat16, base in 4 bits (nf4)',
  );
  assert.equal(
    precision({ dtype: 'bfloat16', load_in_8bit: true, lora_r: 16 }),
    'computes in bfloat16, base in 8 bits',
  );
  assert.equal(
    precision({ dtype: 'bfloat16', lora_r: 16, weights_dtype: 'float32' }),
    'computes in bfloat16, base in bfloat16',
  );
  assert.equal(
    precision({ dtype: 'bfloat16', lora_r: null, weights_dtype: 'float32' }),
    'computes in bfloat16, weights in float32',
  );
});

test('the planned step comes before its alternatives, which have as many rows', () => {
  assert.equal(
    shown({ step_plan: PLAN })['Planned step'],
    '2 rows × 2 micro-batches, 10 of 36 layers recomputed, measured peak 41.2 of 70.7 GiB, 1.457 s',
  );
  assert.deepEqual(
    describePlans(PLAN).map((plan) => Object.values(plan).join(' | ')),
    [
      '2 rows × 2 micro-batches | 10 | 41.2 | 1.457 | chosen, measured',
      '4 rows × 1 micro-batch | 30 | 68.4 | 1.61 | predicted',
      '1 row × 4 micro-batches | 0 | 38.0 | 1.9 | predicted',
    ],
  );
  assert.deepEqual(describePlans(undefined), []);
});

test('a planned step that did not fit says so', () => {
  const plan = {
    ...PLAN,
    recomputed_layers: 36,
    fits: false,
    needed_bytes: null,
    step_seconds: null,
    alternatives: [],
  };
  assert.equal(
    shown({ step_plan: plan })['Planned step'],
    '2 rows × 2 micro-batches, 36 of 36 layers recomputed, measured peak above 70.7 GiB, may run out of memory',
  );
  assert.equal(describePlans(plan)[0].peak, '–');
});
