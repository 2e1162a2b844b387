import assert from 'node:assert/strict';
import test from 'node:test';
import {
  formatCurl,
  readField,
  readGroups,
  isDefault,
  buildRequest,
  areEqual,
  formatValue,
  parseValue,
  formatYaml,
} from '../../../../app/web/static/js/new_run_form.js';

test('fields follow from the schema', () => {
  const kind = (property, definitions = {}) => readField('x', property, definitions).kind;
  assert.equal(kind({ type: 'integer' }), 'integer');
  assert.equal(kind({ anyOf: [{ type: 'integer' }, { type: 'string', pattern: '…' }, { type: 'null' }] }), 'amount');
  assert.equal(kind({ enum: ['a', 'b'], type: 'string' }), 'choice');
  assert.equal(kind({ $ref: '#/$defs/M' }, { M: { enum: ['a'], type: 'string' } }), 'choice');
  assert.equal(kind({ type: 'array', items: { type: 'string' } }), 'list');
  assert.equal(kind({ $ref: '#/$defs/D' }, { D: { type: 'object', properties: {} } }), 'json');
});

test('groups have their fields in the order of the schema', () => {
  const properties = {
    a: { type: 'integer', default: 1, minimum: 0, description: 'About a.' },
    b: { anyOf: [{ $ref: '#/$defs/B' }, { type: 'null' }], default: null },
  };
  const groups = readGroups({
    properties,
    $defs: { B: { enum: ['x', 'y'], type: 'string' } },
    'x-groups': { Second: ['b'], First: ['a'] },
  });
  assert.deepEqual(
    groups.map(({ group, fields }) => [group, fields.map((field) => field.name)]),
    [
      ['Second', ['b']],
      ['First', ['a']],
    ],
  );
  const [[b], [a]] = groups.map(({ fields }) => fields);
  assert.deepEqual([a.kind, a.fallback, a.min, a.isNullable, a.description], ['integer', 1, 0, false, 'About a.']);
  assert.deepEqual([b.kind, b.choices, b.isNullable], ['choice', ['x', 'y'], true]);
});

test('an object with all its defaults is not set, in any order of its fields', () => {
  const properties = { dpo: { $ref: '#/$defs/Dpo', description: 'Options.' } };
  const $defs = { Dpo: { type: 'object', properties: { beta: { default: 0.1 }, loss_type: { default: 'sigmoid' } } } };
  const [
    {
      fields: [dpo],
    },
  ] = readGroups({ properties, $defs, 'x-groups': { All: ['dpo'] } });
  assert.ok(isDefault(dpo, { loss_type: 'sigmoid', beta: 0.1 }) && !isDefault(dpo, { loss_type: 'ipo', beta: 0.1 }));
  assert.ok(
    areEqual({ a: [1, { c: 2, b: 3 }] }, { a: [1, { b: 3, c: 2 }] }) &&
      !areEqual([1, 2], [2, 1]) &&
      areEqual(null, undefined),
  );
});

test('texts become values, and values the same texts', () => {
  const field = (kind) => ({ name: 'x', kind, description: '', fallback: null, isNullable: true, choices: [] });
  assert.equal(parseValue(field('number'), '2e-4'), 2e-4);
  assert.equal(parseValue(field('number'), ''), undefined, 'not set');
  const rank = { ...field('integer'), fallback: 16 };
  assert.equal(parseValue(rank, 'none'), null, 'a default can be replaced by no value');
  assert.deepEqual(
    [formatValue(rank, null), formatValue(rank, undefined), formatValue(field('integer'), null)],
    ['none', '', ''],
  );
  assert.equal(parseValue(field('amount'), '1k'), '1k');
  assert.equal(parseValue(field('amount'), '100'), 100);
  assert.deepEqual(parseValue(field('list'), ' a \n\n b'), ['a', 'b']);
  assert.throws(() => parseValue(field('integer'), '1.5'), /whole number/);
  assert.throws(() => parseValue(field('json'), '{'), /not JSON/);
  assert.equal(formatValue(field('number'), 2e-4), '2e-4');
  assert.ok(isDefault({ ...field('number'), fallback: 3 }, 3) && !isDefault(field('number'), 3));
});

test('requests have only what was set, as YAML and for a shell', () => {
  const body = buildRequest({ name: '', dataset_id: 'ds_1', tags: [] }, { base_model: "it's", dpo: { beta: 0.1 } });
  assert.deepEqual(body, { dataset_id: 'ds_1', config: { base_model: "it's", dpo: { beta: 0.1 } } });
  assert.equal(formatYaml(body), 'dataset_id: "ds_1"\nconfig:\n  base_model: "it\'s"\n  dpo:\n    beta: 0.1\n');
  assert.ok(formatCurl('http://h', body).includes(`it'\\''s`));
});
