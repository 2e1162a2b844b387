import assert from 'node:assert/strict';
import test from 'node:test';
import { describeResources } from '../../../../app/web/static/js/run/resources.js';

const RESOURCES = { devices: 1, hosts: 1, gpu: null, memory_mb: null, labels: [] };

/** @param {object} [resources] @param {object} [requirements] */
const text = (resources = {}, requirements = {}) => {
  const { devices, conditions } = describeResources({
    resources: { ...RESOURCES, ...resources },
    requirements: { sequence_parallel: 1, expert_parallel: 1, ...requirements },
  });
  return [devices, ...conditions].join(', ');
};

test('resources name the kind and number of devices, and only what was asked for or decided', () => {
  assert.equal(text(), '1 device');
  assert.equal(text({ devices: 2 }, { kind: 'cpu' }), '2 CPU devices');
  assert.equal(text({ gpu: 'h200' }, { kind: 'cuda' }), '1 GPU (h200)');
  assert.equal(text({ memory_mb: 81920, labels: ['site-b'] }), '1 device, at least 80.0 GiB each, label site-b');
  const divided = { kind: 'cuda', sharded: true, sequence_parallel: 4, expert_parallel: 2 };
  assert.equal(
    text({ devices: 8, hosts: 2, labels: ['a', 'b'] }, divided),
    '8 GPUs on 2 hosts, model divided among them, 4 share each sequence, 2 share the experts, labels a, b',
  );
});
