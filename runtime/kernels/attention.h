// The operator WindowAttention.
#pragma once
#include <initializer_list>

#include "call.h"

namespace {

struct WindowAttention {
    static constexpr const char* NAME = "WindowAttention";
    static constexpr int INPUTS[] = {ort::FLOAT, ort::FLOAT, ort::FLOAT, ort::FLOAT,
                                     ort::FLOAT, ort::INT64, ort::INT64, ort::BOOL,
                                     ort::FLOAT, ort::FLOAT};
    static constexpr size_t REQUIRED = 1, OUTPUTS = 3;

    int heads, kv_heads;
    float scale;
    int64_t window;

    explicit WindowAttention(const Attributes& attributes)
        : heads(int(attributes.number("heads", 1))),
          kv_heads(int(attributes.number("kv_heads", 1))),
          scale(attributes.real("scale", 1.f)),
          window(attributes.number("window", 0)) {}

    struct Inputs {
        Tensor q, k, v, past[2], length, row_position, window_mask, cos, sin;
        int64_t slots, rows, capacity, size;
        float* present[2];
        float* rotated;  // [slots,rows,heads,size]
    };

    ort::Status* compute(const Call& call) const {
        Inputs in;
        in.q = call.input(0), in.k = call.input(1), in.v = call.input(2);
        in.past[0] = call.input(3), in.past[1] = call.input(4);
        in.length = call.input(5), in.row_position = call.input(6);
        in.window_mask = call.input(7), in.cos = call.input(8), in.sin = call.input(9);
        const char* problem = check(in);
        if (problem != nullptr) return refuse(problem);
        Shape shape = in.q.shape;
        shape.size[2] = heads * in.size;
        float* y = call.output(0, shape);
        for (int i = 0; i < 2; i++) {
            in.present[i] = call.output(1 + i, in.past[i].shape);
            if (in.present[i] != in.past[i].floats() && in.past[i].shape.count() > 0) {
                __builtin_memcpy(in.present[i], in.past[i].data,
                                 sizeof(float) * size_t(in.past[i].shape.count()));
            }
        }
        if (in.slots * in.rows == 0) return nullptr;

        const int group = heads / kv_heads, queries = int(in.rows) * group;
        const int tiles = (queries + QUERIES - 1) / QUERIES;
        const int64_t parts = in.slots * kv_heads * tiles;
        int64_t longest = 0;
        for (int64_t b = 0; b < in.slots; b++) {
            if (in.length.ints()[b] > longest) longest = in.length.ints()[b];
        }
        const int64_t segments = (longest + in.rows + SEGMENT - 1) / SEGMENT;
        // A few parts are split by segments, so that all threads get some.
        const bool by_segment = segments > 1 && parts < 32;
        const size_t weighted = size_t(QUERIES) * in.size;
        const size_t partials = by_segment ? size_t(parts * segments) : 0;
        scratch.begin(Scratch::bytes<float>(size_t(in.slots * in.rows * heads * in.size)) +
                      Scratch::bytes<Partial>(partials) + Scratch::bytes<float>(partials * weighted) +
                      Scratch::bytes<int>(size_t(parts)));
        in.rotated = scratch.take<float>(size_t(in.slots * in.rows * heads * in.size));
        split(call, size_t(in.slots * in.rows), 16384 / (size_t(heads) * in.size) + 1,
              [&](size_t from, size_t to) {
                  for (size_t i = from; i < to; i++) write_row(in, int64_t(i));
              });

        Partial* all = scratch.take<Partial>(partials);
        float* all_weighted = scratch.take<float>(partials * weighted);
        int* finished = scratch.take<int>(size_t(parts));
        for (int64_t i = 0; by_segment && i < parts; i++) finished[i] = 0;
        const auto run = [&](size_t task) {
            const int64_t part = by_segment ? int64_t(task) / segments : int64_t(task);
            const int64_t slot = part / (kv_heads * tiles);
            const int kv_head = int(part / tiles % kv_heads), tile = int(part % tiles);
            const int first = queries * tile / tiles, count = queries * (tile + 1) / tiles - first;
            const Attention attention = of_slot(in, slot);
            const int64_t own = (attention.length + in.rows + SEGMENT - 1) / SEGMENT;
            float* results[QUERIES];
            for (int i = 0; i < count; i++) {
                const int64_t row = slot * in.rows + (first + i) / group;
                const int64_t head = kv_head * group + (first + i) % group;
                results[i] = y + (row * heads + head) * in.size;
            }
            if (by_segment) {
                const int64_t segment = int64_t(task) % segments;
                if (segment < own) {
                    all[task].weighted = all_weighted + task * weighted;
                    kernels().attend(attention, kv_head, first, count, segment, all[task]);
                }
                if (__atomic_add_fetch(&finished[part], 1, __ATOMIC_ACQ_REL) == segments) {
                    kernels().join(all + part * segments, int(own), count, int(in.size), results);
                }
                return;
            }
            part_scratch.begin(Scratch::bytes<Partial>(own) + Scratch::bytes<float>(own * weighted));
            Partial* partial = part_scratch.take<Partial>(own);
            float* sums = part_scratch.take<float>(own * weighted);
            for (int64_t s = 0; s < own; s++) {
                partial[s].weighted = sums + s * weighted;
                kernels().attend(attention, kv_head, first, count, s, partial[s]);
            }
            kernels().join(partial, int(own), count, int(in.size), results);
        };
        call.parallel(size_t(by_segment ? parts * segments : parts), run);
        return nullptr;
    }

    // Sets the sizes of `in`. Returns what does not fit, or null.
    const char* check(Inputs& in) const {
        for (const Tensor* each : {&in.q, &in.past[0], &in.past[1], &in.length, &in.row_position,
                                   &in.window_mask, &in.cos, &in.sin}) {
            if (!*each) return "WindowAttention: an input is missing";
        }
        const Shape& cache = in.past[0].shape;
        if (in.q.shape.rank != 3 || cache.rank != 4 || in.past[1].shape.count() != cache.count() ||
            kv_heads < 1 || heads % kv_heads != 0) {
            return "WindowAttention: q and the caches have other ranks or sizes";
        }
        in.slots = in.q.shape.size[0], in.rows = in.q.shape.size[1];
        in.capacity = cache.size[2], in.size = cache.size[3];
        const int64_t queries = heads * in.size, keys = kv_heads * in.size;
        const bool joined = !in.k && in.q.shape.last() == queries + 2 * keys;
        const bool apart = in.k && in.v && in.q.shape.last() == queries &&
                           in.k.shape.last() == keys && in.v.shape.last() == keys &&
                           in.k.shape.rows() == in.q.shape.rows() &&
                           in.v.shape.rows() == in.q.shape.rows();
        if ((!joined && !apart) || cache.size[0] < in.slots || cache.size[1] != kv_heads) {
            return "WindowAttention: q, k, v and the caches have other sizes";
        }
        if (in.length.shape.count() != in.slots || in.row_position.shape.count() != in.rows ||
            in.window_mask.shape.count() != in.rows * in.rows || in.cos.shape.rank != 2 ||
            in.sin.shape.count() != in.cos.shape.count() || 2 * in.cos.shape.last() > in.size ||
            in.cos.shape.rows() < 1) {
            return "WindowAttention: length, row_position, window_mask, cos or sin do not fit";
        }
        for (int64_t b = 0; b < in.slots; b++) {
            const int64_t length = in.length.ints()[b];
            if (length < 0 || length > in.capacity - in.rows) {
                return "WindowAttention: the window does not fit into the cache";
            }
        }
        return nullptr;
    }

    Attention of_slot(const Inputs& in, int64_t slot) const {
        const size_t base = size_t(slot) * kv_heads * in.capacity * in.size;
        return {in.present[0] + base,
                in.present[1] + base,
                in.rotated + size_t(slot) * in.rows * heads * in.size,
                in.row_position.ints(),
                in.window_mask.bools(),
                in.length.ints()[slot],
                window,
                int(in.rows),
                heads,
                kv_heads,
                int(in.size),
                in.capacity};
    }

    // Rotates the queries of a row, and writes its keys and values into the cache.
    void write_row(const Inputs& in, int64_t index) const {
        const int64_t slot = index / in.rows, row = index % in.rows, size = in.size;
        const int64_t queries = heads * size, keys = kv_heads * size;
        const bool joined = !in.k;
        const float* q = in.q.floats() + index * in.q.shape.last();
        const float* k = joined ? q + queries : in.k.floats() + index * keys;
        const float* v = joined ? k + keys : in.v.floats() + index * keys;
        const int64_t entry = in.length.ints()[slot] + row;
        int64_t position = in.length.ints()[slot] + in.row_position.ints()[row];
        if (position >= in.cos.shape.rows()) position = in.cos.shape.rows() - 1;
        if (position < 0) position = 0;
        const int half = int(in.cos.shape.last());
        const float *cos = in.cos.floats() + position * half, *sin = in.sin.floats() + position * half;
        for (int h = 0; h < heads; h++) {
            kernels().rotate(q + h * size, cos, sin, half, int(size), scale,
                             in.rotated + (index * heads + h) * size);
        }
        for (int h = 0; h < kv_heads; h++) {
            const size_t at = ((size_t(slot) * kv_heads + h) * in.capacity + entry) * size;
            kernels().rotate(k + h * size, cos, sin, half, int(size), 1.f, in.present[0] + at);
            __builtin_memcpy(in.present[1] + at, v + h * size, sizeof(float) * size_t(size));
        }
    }
};

}  // namespace
