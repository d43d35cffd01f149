/* What Python sees: functions that take addresses, sizes and strides, and let go of the interpreter while they work.
 * They check nothing: the typed wrappers in __init__.py do, and nobody else calls these. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "awq.h"
#include "decoder.h"
#include "experts.h"
#include "host_experts.h"
#include "rank_sums.h"
#include "rank_words.h"
#include "scaled.h"
#include "weave.h"

/* Reads arguments one after another; after the first that is wrong it yields zeros and the error stays set. */
typedef struct {
    PyObject *const *next;
    Py_ssize_t left;
} arguments;

static void *address(arguments *args) {
    if (args->left-- <= 0 || PyErr_Occurred()) return NULL;
    return PyLong_AsVoidPtr(*args->next++);
}

static long whole(arguments *args) {
    if (args->left-- <= 0 || PyErr_Occurred()) return 0;
    return PyLong_AsLong(*args->next++);
}


static PyObject *object(arguments *args) {
    if (args->left-- <= 0 || PyErr_Occurred()) return NULL;
    return *args->next++;
}

static float real(arguments *args) {
    if (args->left-- <= 0 || PyErr_Occurred()) return 0;
    return (float)PyFloat_AsDouble(*args->next++);
}

static int complete(const arguments *args) {
    if (PyErr_Occurred()) return 0;
    if (args->left == 0) return 1;
    PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
    return 0;
}

static PyObject *finish(int failed) { return failed ? PyErr_NoMemory() : Py_NewRef(Py_None); }

static PyObject *py_share(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    void *parallel = address(&args);
    if (!complete(&args)) return NULL;
    share_runtime(parallel);
    return finish(0);
}

static PyObject *py_stop(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    if (!complete(&args)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    stop_pool();
    Py_END_ALLOW_THREADS
    return finish(0);
}

static PyObject *py_matmul(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    product wanted;
    wanted.x = address(&args);
    wanted.x_stride = whole(&args);
    wanted.out = address(&args);
    wanted.out_stride = whole(&args);
    wanted.weights = address(&args);
    wanted.bias = address(&args);
    wanted.rows = whole(&args);
    wanted.columns = whole(&args);
    wanted.outputs = whole(&args);
    wanted.layout = (enum layout)whole(&args);
    wanted.add = (int)whole(&args);
    wanted.threads = (int)whole(&args);
    if (!complete(&args)) return NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = multiply(&wanted);
    Py_END_ALLOW_THREADS
    return finish(failed);
}

static PyObject *py_expand(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    expansion wanted;
    wanted.weights = address(&args);
    wanted.chosen = address(&args);
    wanted.rows = whole(&args);
    wanted.stored_rows = whole(&args);
    wanted.columns = whole(&args);
    wanted.layout = (enum layout)whole(&args);
    wanted.out = address(&args);
    wanted.out_stride = whole(&args);
    wanted.threads = (int)whole(&args);
    if (!complete(&args)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    expand_rows(&wanted);
    Py_END_ALLOW_THREADS
    return finish(0);
}

static PyObject *py_weave(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    uint8_t *weights = address(&args);
    long rows = whole(&args), columns = whole(&args);
    enum layout layout = (enum layout)whole(&args);
    if (!complete(&args)) return NULL;
    int woven;
    Py_BEGIN_ALLOW_THREADS
    woven = weave_rows(weights, rows, columns, layout);
    Py_END_ALLOW_THREADS
    return woven < 0 ? PyErr_NoMemory() : PyLong_FromLong(woven);
}

static PyObject *py_weave_planes(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    const scaled_matrix *planes = address(&args);
    if (!complete(&args)) return NULL;
    int woven;
    Py_BEGIN_ALLOW_THREADS
    woven = weave_scaled(planes);
    Py_END_ALLOW_THREADS
    return woven < 0 ? PyErr_NoMemory() : PyLong_FromLong(woven);
}

static PyObject *py_turn_awq(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    const uint32_t *words = address(&args);
    long inputs = whole(&args), stride = whole(&args);
    uint8_t *codes = address(&args);
    if (!complete(&args)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    turn_awq(words, inputs, stride, codes);
    Py_END_ALLOW_THREADS
    return finish(0);
}

static PyObject *py_attend(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    attention wanted;
    wanted.query = address(&args);
    wanted.query_stride = whole(&args);
    wanted.out = address(&args);
    wanted.out_stride = whole(&args);
    wanted.keys = address(&args);
    wanted.values = address(&args);
    wanted.page_bytes = whole(&args);
    wanted.stored = (enum layout)whole(&args);
    wanted.block_tokens = whole(&args);
    wanted.heads = whole(&args);
    wanted.kv_heads = whole(&args);
    wanted.dim = whole(&args);
    wanted.tables = address(&args);
    wanted.table_stride = whole(&args);
    wanted.slots = address(&args);
    wanted.ends = address(&args);
    wanted.counts = address(&args);
    wanted.firsts = address(&args);
    wanted.rows = whole(&args);
    wanted.window = whole(&args);
    wanted.scale = real(&args);
    wanted.softcap = real(&args);
    wanted.threads = (int)whole(&args);
    if (!complete(&args)) return NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = attend(&wanted);
    Py_END_ALLOW_THREADS
    return finish(failed);
}

static PyObject *py_normalize(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    normalization wanted;
    wanted.x = address(&args);
    wanted.x_stride = whole(&args);
    wanted.residual = address(&args);
    wanted.residual_stride = whole(&args);
    wanted.weight = address(&args);
    wanted.out = address(&args);
    wanted.out_stride = whole(&args);
    wanted.rows = whole(&args);
    wanted.columns = whole(&args);
    wanted.epsilon = real(&args);
    wanted.threads = (int)whole(&args);
    if (!complete(&args)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    normalize(&wanted);
    Py_END_ALLOW_THREADS
    return finish(0);
}

static PyObject *py_gate(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    gating wanted;
    wanted.gate_up = address(&args);
    wanted.gate_stride = whole(&args);
    wanted.out = address(&args);
    wanted.out_stride = whole(&args);
    wanted.rows = whole(&args);
    wanted.columns = whole(&args);
    wanted.activation = (enum activation)whole(&args);
    wanted.threads = (int)whole(&args);
    if (!complete(&args)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    gate(&wanted);
    Py_END_ALLOW_THREADS
    return finish(0);
}

static PyObject *py_turn(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    turning wanted;
    wanted.query = address(&args);
    wanted.query_stride = whole(&args);
    wanted.key = address(&args);
    wanted.key_stride = whole(&args);
    wanted.value = address(&args);
    wanted.value_stride = whole(&args);
    wanted.cosines = address(&args);
    wanted.sines = address(&args);
    wanted.positions = address(&args);
    wanted.places = address(&args);
    wanted.center = address(&args);
    wanted.keys = address(&args);
    wanted.values = address(&args);
    wanted.stored = (enum layout)whole(&args);
    wanted.tokens = whole(&args);
    wanted.heads = whole(&args);
    wanted.kv_heads = whole(&args);
    wanted.dim = whole(&args);
    wanted.half = whole(&args);
    wanted.threads = (int)whole(&args);
    if (!complete(&args)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    turn_and_store(&wanted);
    Py_END_ALLOW_THREADS
    return finish(0);
}

/* What layers have in common: sizes, the buffers and angles of a step, the pool, and the rows: in that order. */
static decoder_layer read_shared(arguments *args) {
    decoder_layer layer = {0};
    turning *turn = &layer.turn;
    attention *attend_to = &layer.attention;
    layer.epsilon = real(args);
    layer.activation = (enum activation)whole(args);
    layer.hidden = whole(args);
    layer.inner_columns = whole(args);
    turn->heads = attend_to->heads = whole(args);
    turn->kv_heads = attend_to->kv_heads = whole(args);
    turn->dim = attend_to->dim = whole(args);
    attend_to->scale = real(args);
    layer.stream = address(args);
    layer.normed = address(args);
    layer.qkv = address(args);
    layer.attended = address(args);
    layer.gate_up = address(args);
    layer.inner = address(args);
    layer.tokens = turn->tokens = whole(args);
    layer.mlp_tokens = whole(args);
    turn->cosines = address(args);
    turn->sines = address(args);
    turn->half = whole(args);
    turn->places = address(args);
    attend_to->page_bytes = whole(args);
    turn->stored = attend_to->stored = (enum layout)whole(args);
    attend_to->block_tokens = whole(args);
    attend_to->tables = address(args);
    attend_to->table_stride = whole(args);
    attend_to->slots = address(args);
    attend_to->ends = address(args);
    attend_to->counts = address(args);
    attend_to->firsts = address(args);
    attend_to->rows = whole(args);
    attend_to->window = whole(args);
    layer.threads = turn->threads = attend_to->threads = (int)whole(args);
    return layer;
}

/* While other ranks are awaited: a Python function is told, with the seconds so far, and may raise. */
static int tell_watch(void *function, long waited_ns) {
    const PyGILState_STATE held = PyGILState_Ensure();
    PyObject *done = PyErr_CheckSignals() ? NULL : PyObject_CallFunction(function, "d", (double)waited_ns / 1e9);
    Py_XDECREF(done);
    PyGILState_Release(held);
    return done == NULL;
}

/* The ranks' group (0: none) and its watch. */
static rank_sums read_sums(arguments *args) {
    rank_sums sums = {.group = address(args), .watch = tell_watch};
    sums.with = object(args);
    return sums;
}

/* What was left by its watch has raised already. */
static PyObject *finish_ranks(int failed) { return failed == RANKS_LEFT ? NULL : finish(failed); }

static PyObject *py_layers(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    const layer_entry *entries = address(&args);
    const long layers = whole(&args);
    rank_sums sums = read_sums(&args);
    float *branch = address(&args);
    decoder_layer shared = read_shared(&args);
    if (!complete(&args)) return NULL;
    shared.sums = sums;
    shared.sums.threads = shared.threads;
    shared.branch = branch;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = run_layers(&shared, entries, layers);
    Py_END_ALLOW_THREADS
    return finish_ranks(failed);
}

/* The matrices of a layer's experts, then what one step has: in experts.py's order. */
static PyObject *py_experts(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    expert_layer layer;
    layer.gate_up = address(&args);
    layer.down = address(&args);
    layer.experts = whole(&args);
    layer.gate_up_parts = whole(&args);
    layer.per_token = whole(&args);
    layer.normalized = (int)whole(&args);
    layer.activation = (enum activation)whole(&args);
    layer.hidden = whole(&args);
    layer.inner_columns = whole(&args);
    layer.logits = address(&args);
    layer.x = address(&args);
    layer.out = address(&args);
    layer.out_stride = whole(&args);
    layer.tokens = whole(&args);
    layer.sorted = address(&args);
    layer.gate_up_out = address(&args);
    layer.inner = address(&args);
    layer.weights = address(&args);
    layer.chosen = address(&args);
    layer.places = address(&args);
    layer.firsts = address(&args);
    layer.threads = (int)whole(&args);
    if (!complete(&args)) return NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = run_experts(&layer);
    Py_END_ALLOW_THREADS
    return finish(failed);
}

static host_experts read_host(arguments *args) {
    host_experts host = {0};
    host.layers = address(args);
    host.count = whole(args);
    host.hidden = whole(args);
    host.per_token = whole(args);
    host.numbers = (enum layout)whole(args);
    return host;
}

static PyObject *py_host_room(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    const host_experts host = read_host(&args);
    const long tokens = whole(&args);
    if (!complete(&args)) return NULL;
    return PyLong_FromLong(host_room_bytes(&host, tokens));
}

static PyObject *py_serve(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    host_experts host = read_host(&args);
    host.room = address(&args);
    host.room_bytes = whole(&args);
    const int step = (int)whole(&args);
    const long tokens = whole(&args), patience_ns = whole(&args);
    host.threads = (int)whole(&args);
    if (!complete(&args)) return NULL;
    host_outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = serve_step(&host, step, tokens, patience_ns);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("(illll)", (int)outcome.result, outcome.layer, outcome.waited_ns, outcome.computed_ns,
                         outcome.pairs);
}

static PyObject *py_post(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    rank_word *word = address(&args);
    const unsigned value = (unsigned)whole(&args);
    if (!complete(&args)) return NULL;
    post_word(word, value);
    return finish(0);
}

static PyObject *py_await(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    rank_word *word = address(&args);
    const unsigned value = (unsigned)whole(&args);
    rank_word *alarm = address(&args);
    const unsigned calm = (unsigned)whole(&args);
    const long spin_ns = whole(&args), patience_ns = whole(&args);
    if (!complete(&args)) return NULL;
    enum rank_outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = await_word(word, value, alarm, calm, spin_ns, patience_ns);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong((long)outcome);
}

static PyObject *py_await_mail(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    rank_word *word = address(&args);
    const unsigned value = (unsigned)whole(&args);
    rank_word *alarm = address(&args);
    const unsigned calm = (unsigned)whole(&args);
    const long mail_spin_ns = whole(&args), patience_ns = whole(&args);
    long *waited_ns = address(&args);
    if (!complete(&args)) return NULL;
    enum rank_outcome outcome;
    Py_BEGIN_ALLOW_THREADS
    outcome = await_mail(word, value, alarm, calm, mail_spin_ns, patience_ns, waited_ns);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong((long)outcome);
}

static PyObject *py_meet(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    const rank_sums sums = read_sums(&args);
    if (!complete(&args)) return NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = meet_ranks(&sums);
    Py_END_ALLOW_THREADS
    return finish_ranks(failed);
}

static PyObject *py_sum(PyObject *module, PyObject *const *values, Py_ssize_t count) {
    (void)module;
    arguments args = {values, count};
    rank_sums sums = read_sums(&args);
    float *x = address(&args);
    const long numbers = whole(&args);
    sums.threads = (int)whole(&args);
    if (!complete(&args)) return NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = sum_ranks(&sums, x, x, numbers, 0);
    Py_END_ALLOW_THREADS
    return finish_ranks(failed);
}

#define FUNCTION(name, function, text) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, text}

static PyMethodDef METHODS[] = {
    FUNCTION("share", py_share, "(GOMP_parallel): share this OpenMP runtime's threads; 0: have a pool of our own."),
    FUNCTION("stop", py_stop, "(): end the threads; the next call starts new ones."),
    FUNCTION("matmul", py_matmul,
             "(x, x_stride, out, out_stride, weights, bias, rows, columns, outputs, layout, add, threads)"),
    FUNCTION("expand", py_expand, "(weights, chosen, rows, stored_rows, columns, layout, out, out_stride, threads)"),
    FUNCTION("weave", py_weave, "(weights, rows, columns, layout): the layout they have from now on."),
    FUNCTION("weave_planes", py_weave_planes, "(scaled_matrix): the layout its planes have from now on."),
    FUNCTION("turn_awq", py_turn_awq, "(words, inputs, words of an input, codes)"),
    FUNCTION("attend", py_attend,
             "(query, query_stride, out, out_stride, keys, values, page_bytes, stored, block_tokens, heads, kv_heads, "
             "dim, tables, table_stride, slots, ends, counts, firsts, rows, window, scale, softcap, threads)"),
    FUNCTION("normalize", py_normalize,
             "(x, x_stride, residual, residual_stride, weight, out, out_stride, rows, columns, epsilon, threads)"),
    FUNCTION("gate", py_gate, "(gate_up, gate_stride, out, out_stride, rows, columns, activation, threads)"),
    FUNCTION("turn", py_turn,
             "(query, query_stride, key, key_stride, value, value_stride, cosines, sines, positions, places, center, "
             "keys, values, stored, tokens, heads, kv_heads, dim, half, threads)"),
    FUNCTION("layers", py_layers, "(entries, count, group, watch, branch), then what decoder layers share, as read_shared reads it."),
    FUNCTION("experts", py_experts, "Matrices and buffers of a layer's experts, as py_experts reads them."),
    FUNCTION("host_room", py_host_room, "(layers, count, hidden, per_token, numbers, tokens): bytes that serve needs."),
    FUNCTION("serve", py_serve,
             "(layers, count, hidden, per_token, numbers, room, room_bytes, step, tokens, patience_ns, threads): "
             "(result, layer, waited_ns, computed_ns, pairs), as host_experts.h has them."),
    FUNCTION("post", py_post, "(word, value): as rank_words.h has it."),
    FUNCTION("await_word", py_await, "(word, value, alarm, calm, spin_ns, patience_ns): a rank_outcome."),
    FUNCTION("await_mail", py_await_mail,
             "(word, value, alarm, calm, mail_spin_ns, patience_ns, waited_ns's address): a rank_outcome."),
    FUNCTION("meet", py_meet, "(group, watch): as rank_sums.h has it."),
    FUNCTION("sum_ranks", py_sum, "(group, watch, x, count, threads): x becomes the sum of all ranks' x."),
    {NULL, NULL, 0, NULL},
};

/* The module is built once for each variant (setup.py), under the variant's name. */
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define INIT_OF(name) PyInit__kernels_##name
#define INIT(name) INIT_OF(name)

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_kernels_" TEXT(VARIANT), "Compiled CPU kernels; see holdfast.execution.native.", -1, METHODS,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC INIT(VARIANT)(void) {
    if (prepare_pool() != 0) return PyErr_NoMemory();
    if (prepare_tiles() != 0) {
        PyErr_SetString(PyExc_ImportError, "the system does not let this process use AMX tiles");
        return NULL;
    }
    PyObject *module = PyModule_Create(&MODULE);
    if (module != NULL && PyModule_AddStringConstant(module, "VARIANT", TEXT(VARIANT)) != 0) Py_CLEAR(module);
    return module;
}
