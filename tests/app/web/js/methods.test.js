import assert from 'node:assert/strict';
import test from 'node:test';
import { OBJECTIVES, readChoice, describeGroup, applyChoice } from '../../../../app/web/static/js/methods.js';

test('every pair of an objective and trained weights is a configuration, and is read from it', () => {
  for (const objective of OBJECTIVES.map(([name]) => name)) {
    for (const adapter of ['qlora', 'lora', 'full']) {
      const config = applyChoice(
        { base_model: 'any', method: 'dpo', lora_r: 8, load_in_8bit: true },
        objective,
        adapter,
      );
      assert.deepEqual(readChoice(config, 'qlora'), { objective, adapter });
      assert.equal(config.base_model, 'any');
      assert.ok(!('load_in_8bit' in config));
    }
  }
  assert.deepEqual(applyChoice({ lora_r: 8 }, 'sft', 'lora'), { lora_r: 8, method: 'lora' });
  assert.deepEqual(applyChoice({ lora_r: 8 }, 'dpo', 'full'), { method: 'dpo', lora_r: null });
  assert.deepEqual(applyChoice({ method: 'dpo', lora_r: null }, 'dpo', 'lora'), { method: 'dpo', load_in_4bit: false });
});

test('configurations of others are read as they train', () => {
  assert.deepEqual(readChoice({}, 'qlora'), { objective: 'sft', adapter: 'qlora' });
  assert.deepEqual(readChoice({ method: 'sft', lora_r: null }, 'qlora'), { objective: 'sft', adapter: 'full' });
  assert.deepEqual(readChoice({ method: 'kto', load_in_4bit: false, load_in_8bit: true }, 'qlora'), {
    objective: 'kto',
    adapter: 'qlora',
  });
});

test('the order best says by which metric runs of a method are compared', () => {
  assert.equal(describeGroup({ method: 'rlhf', best_eval: 1 }), 'rlhf, by eval reward, highest first');
  assert.equal(describeGroup({ method: 'dpo', best_eval: 1, best_loss: 2 }), 'dpo, by eval loss, lowest first');
  assert.equal(describeGroup({ method: 'dpo', best_loss: 2 }), 'dpo, by train loss, lowest first');
  assert.equal(describeGroup({ method: 'dpo' }), 'without a result, newest first');
});
