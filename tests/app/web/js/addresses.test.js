import assert from 'node:assert/strict';
import test from 'node:test';
import { matchRoute, sanitizeAddress } from '../../../../app/web/static/js/addresses.js';

test('addresses name pages', () => {
  assert.deepEqual(matchRoute('/'), { name: 'runs', params: {} });
  assert.deepEqual(matchRoute('/runs/run_1/'), { name: 'run', params: { id: 'run_1' } });
  assert.deepEqual(matchRoute('/datasets/a%2Fb'), { name: 'datasets', params: { id: 'a/b' } });
  for (const other of ['/docs', '/runs', '/runs/', '/runs/a/b', '/runs/%E0%A4%A', '/login/x', '//']) {
    assert.equal(matchRoute(other)?.name ?? null, other === '//' ? 'runs' : null, other);
  }
});

test('signing in leads to an address of this site only', () => {
  assert.equal(sanitizeAddress('/runs/run_1?tab=log'), '/runs/run_1?tab=log');
  for (const foreign of [
    'https://evil.example',
    '//evil.example',
    '/\\evil.example',
    'javascript:alert(1)',
    '',
    null,
    '/\t/evil.example',
  ]) {
    assert.equal(sanitizeAddress(foreign), '/', String(foreign));
  }
});
