// The operators of the trunk for CPUs, domain pass.cpu. Shapes: B slots, Q rows of the window, K inputs
// and N outputs of a product, H and G heads of queries and of keys, D the size of a head, S capacity.
//
//   Product          x [..,K], weights (kernels.h), bias [N]?, rows [A]?, a?, b? -> [..,N]
//                    `activation`: gate groups and up groups alternate, and y = activation(gate) * up.
//                    rows, a, b: rows A of each slot get b * (a * x) too; a has `rank` columns for each
//                    part of the outputs: gate and up, or groups below and from `part1`, `part2` on.
//   DenseProduct     x [..,K], weights float [K,N], or [N,K] if `by_column`, bias [N]? -> [..,N]
//   Gate             gate, up -> activation(gate) * up
//   AddNorm          x, r?, scale [N] -> rms(x + r) * scale, x + r
//   WindowAttention  q, k?, v?, past key, past value [B,G,S,D], length [B], row_position [Q],
//                    window_mask [Q,Q], cos, sin [positions,D/2 or less] -> [B,Q,H*D], present key,
//                    present value; without k and v, q has all three
//   Embed            ids, table float [V,N], look-ahead table [L,N] -> [..,N]
//   EmbedPacked      the same from the weights of a Product, whose columns are tokens
#include <cstdlib>
#include <initializer_list>

#include "kernels.h"
#include "ort.h"

namespace {

using namespace pass;

ort::Api api;

template <class Function>
Function* entry(ort::Entry place) {
    return reinterpret_cast<Function*>(const_cast<void*>(api[place]));
}

ort::Status* refuse(const char* message) {
    constexpr int INVALID_ARGUMENT = 2;
    return entry<ort::Status*(int, const char*)>(ort::CreateStatus)(INVALID_ARGUMENT, message);
}

// Memory of a thread that grows and is used again by the next operator.
class Scratch {
   public:
    ~Scratch() { free(memory_); }
    void begin(size_t bytes) {
        used_ = 0;
        if (bytes <= size_) return;
        free(memory_);
        memory_ = static_cast<char*>(aligned_alloc(64, (bytes + 63) / 64 * 64));
        if (memory_ == nullptr) abort();
        size_ = bytes;
    }
    template <class T>
    T* take(size_t count) {
        T* result = reinterpret_cast<T*>(memory_ + used_);
        used_ += bytes<T>(count);
        return result;
    }
    template <class T>
    static size_t bytes(size_t count) {
        return (count * sizeof(T) + 63) / 64 * 64;
    }

   private:
    char* memory_ = nullptr;
    size_t size_ = 0, used_ = 0;
};

// Of the thread that runs the operator, and of a thread that runs a part of it.
thread_local Scratch scratch, part_scratch;

struct Shape {
    int64_t size[8];
    size_t rank = 0;

    int64_t last() const { return rank ? size[rank - 1] : 1; }
    int64_t rows() const {
        int64_t count = 1;
        for (size_t i = 0; i + 1 < rank; i++) count *= size[i];
        return count;
    }
    int64_t count() const { return rows() * last(); }
};

struct Tensor {
    const void* data = nullptr;  // null if the input is left out
    Shape shape;

    explicit operator bool() const { return data != nullptr; }
    const float* floats() const { return static_cast<const float*>(data); }
    const int64_t* ints() const { return static_cast<const int64_t*>(data); }
    const uint8_t* bytes() const { return static_cast<const uint8_t*>(data); }
    const bool* bools() const { return static_cast<const bool*>(data); }
};

class Call {
   public:
    explicit Call(ort::Context* context) : context_(context) {}

    Tensor input(size_t index) const {
        const ort::Value* value = nullptr;
        entry<ort::Status*(ort::Context*, size_t, const ort::Value**)>(
            ort::KernelContext_GetInput)(context_, index, &value);
        Tensor tensor;
        if (value == nullptr) return tensor;
        ort::ShapeInfo* info = nullptr;
        entry<ort::Status*(const ort::Value*, ort::ShapeInfo**)>(ort::GetTensorTypeAndShape)(value,
                                                                                            &info);
        entry<ort::Status*(const ort::ShapeInfo*, size_t*)>(ort::GetDimensionsCount)(
            info, &tensor.shape.rank);
        if (tensor.shape.rank > 8) tensor.shape.rank = 8;
        entry<ort::Status*(const ort::ShapeInfo*, int64_t*, size_t)>(ort::GetDimensions)(
            info, tensor.shape.size, tensor.shape.rank);
        entry<void(ort::ShapeInfo*)>(ort::ReleaseTensorTypeAndShapeInfo)(info);
        tensor.data = memory(const_cast<ort::Value*>(value));
        static const char nothing = 0;  // a tensor without elements may have no memory
        if (tensor.data == nullptr) tensor.data = &nothing;
        return tensor;
    }

    // Null if nobody reads the output.
    float* output(size_t index, const Shape& shape) const {
        ort::Value* value = nullptr;
        entry<ort::Status*(ort::Context*, size_t, const int64_t*, size_t, ort::Value**)>(
            ort::KernelContext_GetOutput)(context_, index, shape.size, shape.rank, &value);
        return value == nullptr ? nullptr : static_cast<float*>(memory(value));
    }

    // Calls task(i) for i < count, perhaps in several threads.
    template <class Task>
    void parallel(size_t count, const Task& task) const {
        if (count == 1) {
            task(0);
            return;
        }
        const auto run = [](void* data, size_t i) { (*static_cast<const Task*>(data))(i); };
        entry<ort::Status*(const ort::Context*, void (*)(void*, size_t), size_t, size_t, void*)>(
            ort::KernelContext_ParallelFor)(context_, run, count, count < 32 ? count : 32,
                                            const_cast<Task*>(&task));
    }

   private:
    static void* memory(ort::Value* value) {
        void* data = nullptr;
        entry<ort::Status*(ort::Value*, void**)>(ort::GetTensorMutableData)(value, &data);
        return data;
    }

    ort::Context* context_;
};

class Attributes {
   public:
    explicit Attributes(const ort::Info* info) : info_(info) {}

    int64_t number(const char* name, int64_t missing) const {
        int64_t value = missing;
        return kept(entry<ort::Status*(const ort::Info*, const char*, int64_t*)>(
                   ort::KernelInfoGetAttribute_int64)(info_, name, &value))
                   ? value
                   : missing;
    }
    float real(const char* name, float missing) const {
        float value = missing;
        return kept(entry<ort::Status*(const ort::Info*, const char*, float*)>(
                   ort::KernelInfoGetAttribute_float)(info_, name, &value))
                   ? value
                   : missing;
    }

   private:
    static bool kept(ort::Status* status) {
        if (status == nullptr) return true;
        entry<void(ort::Status*)>(ort::ReleaseStatus)(status);
        return false;
    }

    const ort::Info* info_;
};

// Calls task(first, last) for parts of 0 .. count-1 of about `grain` units each. The number of parts
// is a multiple of 4, so that 2 or 4 threads get equal shares.
template <class Task>
void split(const Call& call, size_t count, size_t grain, const Task& task) {
    size_t parts = count / (grain ? grain : 1);
    parts = parts < 2 ? 1 : parts > 28 ? 32 : (parts + 3) / 4 * 4;
    if (parts > count) parts = count ? count : 1;
    call.parallel(parts, [&](size_t i) { task(count * i / parts, count * (i + 1) / parts); });
}

// Rows that were rounded to 8 bits, in tiles of up to kernels().tile_rows rows of about equal number.
class RoundedRows {
   public:
    RoundedRows(size_t rows, int inputs)
        : rows_(rows),
          inputs_(inputs),
          blocks_((inputs + BLOCK - 1) / BLOCK),
          tiles_((rows + kernels().tile_rows - 1) / kernels().tile_rows) {}

    size_t size() const { return rows_ * blocks_; }
    size_t tiles() const { return tiles_; }
    size_t first(size_t tile) const { return rows_ * tile / tiles_; }

    // row(i) points to the inputs of row i.
    template <class Row>
    void round(const Call& call, RowBlock* blocks, const Row& row) {
        blocks_of_rows_ = blocks;
        constexpr size_t ROWS_AT_ONCE = 12;  // fewer are rounded sooner than a thread is called
        split(call, tiles_, ROWS_AT_ONCE * 1024 / (inputs_ * rows_ / tiles_ + 1) + 1,
              [&](size_t from, size_t to) {
                  for (size_t t = from; t < to; t++) {
                      const size_t begin = first(t), count = first(t + 1) - begin;
                      for (size_t m = 0; m < count; m++) {
                          kernels().round_row(row(begin + m), inputs_,
                                              blocks + begin * blocks_ + m, int(count));
                      }
                  }
              });
    }

    // y [rows,16] = the rows times a group of weights.
    void multiply(const Packed& weights, int group, float* y) const {
        for (size_t t = 0; t < tiles_; t++) {
            const size_t begin = first(t);
            kernels().product_tile(weights.group(group), int(blocks_), weights.bits,
                                   int(first(t + 1) - begin), blocks_of_rows_ + begin * blocks_,
                                   y + begin * GROUP);
        }
    }

   private:
    size_t rows_;
    int inputs_;
    size_t blocks_, tiles_;
    const RowBlock* blocks_of_rows_ = nullptr;
};

bool is_packed(int bits) { return bits == 4 || bits == 5 || bits == 8; }

bool fits(const Tensor& tensor, const Packed& weights) {
    return size_t(tensor.shape.count()) == weights.groups() * weights.group_bytes();
}

constexpr size_t BYTES_OF_PART = 64 << 10;  // weights that a thread takes at once

struct Product {
    static constexpr const char* NAME = "Product";
    static constexpr int INPUTS[] = {ort::FLOAT, ort::UINT8, ort::FLOAT,
                                     ort::INT64, ort::UINT8, ort::UINT8};
    static constexpr size_t REQUIRED = 2, OUTPUTS = 1;

    Packed weights, down, up;
    int activation, rank;
    int64_t part1, part2, columns;

    explicit Product(const Attributes& attributes) {
        const auto number = [&](const char* name, int64_t missing) {
            return int(attributes.number(name, missing));
        };
        activation = number("activation", NONE);
        columns = number("N", 0);
        const int groups = int((columns + GROUP - 1) / GROUP) * (activation ? 2 : 1);
        weights = {nullptr, number("K", 0), groups * GROUP, number("bits", 4)};
        rank = number("rank", 0);
        part1 = number("part1", groups);
        part2 = number("part2", groups);
        const int parts = activation ? 2 : part2 < groups ? 3 : part1 < groups ? 2 : 1;
        down = {nullptr, weights.inputs, rank * parts, number("adapter_bits", 8)};
        up = {nullptr, rank, groups * GROUP, number("adapter_bits", 8)};
    }

    int parts() const { return rank ? down.columns / rank : 0; }
    int part(int group) const {
        return activation ? group % 2 : group >= part2 ? 2 : group >= part1 ? 1 : 0;
    }

    ort::Status* compute(const Call& call) const {
        const Tensor x = call.input(0), packed = call.input(1), bias = call.input(2);
        const Tensor adapted = call.input(3), a = call.input(4), b = call.input(5);
        if (weights.inputs < 1 || columns < 1 || !is_packed(weights.bits) || !is_packed(down.bits)) {
            return refuse("Product: K, N or bits are out of range");
        }
        Product op = *this;
        op.weights.data = packed.bytes();
        op.down.data = a.bytes();
        op.up.data = b.bytes();
        const bool has_adapter = adapted && a && b && rank > 0 && adapted.shape.count() > 0;
        if (x.shape.last() != weights.inputs || !fits(packed, weights) ||
            (bias && bias.shape.count() != weights.columns && bias.shape.count() != columns) ||
            (has_adapter && (!fits(a, down) || !fits(b, up) || x.shape.rank != 3))) {
            return refuse("Product: the sizes of inputs, weights and attributes do not fit");
        }
        const size_t rows = size_t(x.shape.rows());
        Shape shape = x.shape;
        shape.size[shape.rank - 1] = columns;
        float* y = call.output(0, shape);
        if (rows == 0) return nullptr;

        const size_t listed = has_adapter ? size_t(adapted.shape.count()) : 0;
        const size_t width = has_adapter ? size_t(x.shape.size[1]) : 1;
        const size_t chosen = has_adapter ? listed * size_t(x.shape.size[0]) : 0;
        const auto chosen_row = [&](size_t i) {
            return i / listed * width + size_t(adapted.ints()[i % listed]);
        };
        for (size_t i = 0; i < chosen; i++) {
            if (chosen_row(i) >= rows) return refuse("Product: an adapted row is not in the window");
        }
        RoundedRows main(rows, weights.inputs), low(chosen, weights.inputs), high(chosen, rank);
        const size_t low_columns = size_t(down.groups()) * GROUP;
        scratch.begin(Scratch::bytes<RowBlock>(main.size()) + Scratch::bytes<RowBlock>(low.size()) +
                      parts() * Scratch::bytes<RowBlock>(high.size()) +
                      Scratch::bytes<float>(chosen * low_columns));
        main.round(call, scratch.take<RowBlock>(main.size()), [&](size_t i) {
            return x.floats() + i * weights.inputs;
        });
        RoundedRows by_part[3] = {high, high, high};
        if (chosen) {
            low.round(call, scratch.take<RowBlock>(low.size()), [&](size_t i) {
                return x.floats() + chosen_row(i) * weights.inputs;
            });
            float* lowered = scratch.take<float>(chosen * low_columns);
            split(call, down.groups(), BYTES_OF_PART / 4 / down.group_bytes(),
                  [&](size_t from, size_t to) {
                      part_scratch.begin(Scratch::bytes<float>(chosen * GROUP));
                      float* tile = part_scratch.take<float>(chosen * GROUP);
                      for (size_t g = from; g < to; g++) {
                          low.multiply(op.down, int(g), tile);
                          for (size_t i = 0; i < chosen * GROUP; i++) {
                              lowered[i / GROUP * low_columns + g * GROUP + i % GROUP] = tile[i];
                          }
                      }
                  });
            for (int p = 0; p < parts(); p++) {
                by_part[p].round(call, scratch.take<RowBlock>(high.size()), [&](size_t i) {
                    return lowered + i * low_columns + size_t(p) * rank;
                });
            }
        }
        const int each = activation ? 2 : 1;  // groups that make 16 outputs
        split(call, size_t(weights.groups() / each), BYTES_OF_PART / (each * weights.group_bytes()),
              [&](size_t from, size_t to) {
                  part_scratch.begin(Scratch::bytes<float>((2 * rows + chosen) * GROUP));
                  float* tiles[2] = {part_scratch.take<float>(rows * GROUP), nullptr};
                  tiles[1] = part_scratch.take<float>(rows * GROUP);
                  float* added = part_scratch.take<float>(chosen * GROUP);
                  for (size_t unit = from; unit < to; unit++) {
                      for (int e = 0; e < each; e++) {
                          const int group = int(unit) * each + e;
                          main.multiply(op.weights, group, tiles[e]);
                          if (chosen == 0) continue;
                          by_part[part(group)].multiply(op.up, group, added);
                          for (size_t i = 0; i < chosen; i++) {
                              float* row = tiles[e] + chosen_row(i) * GROUP;
                              for (int c = 0; c < GROUP; c++) row[c] += added[i * GROUP + c];
                          }
                      }
                      if (activation) {
                          kernels().gate(activation, tiles[0], tiles[1], int(rows * GROUP), tiles[0]);
                      }
                      write(tiles[0], rows, unit * GROUP, bias, y);
                  }
              });
        return nullptr;
    }

    // Writes 16 columns, from `column` on, of all rows.
    void write(const float* tile, size_t rows, size_t column, const Tensor& bias, float* y) const {
        const size_t count = columns - column < GROUP ? size_t(columns) - column : GROUP;
        const float* added = bias ? bias.floats() + column : nullptr;
        for (size_t m = 0; m < rows; m++) {
            float* out = y + m * size_t(columns) + column;
            for (size_t c = 0; c < count; c++) {
                out[c] = added ? tile[m * GROUP + c] + added[c] : tile[m * GROUP + c];
            }
        }
    }
};

struct DenseProduct {
    static constexpr const char* NAME = "DenseProduct";
    static constexpr int INPUTS[] = {ort::FLOAT, ort::FLOAT, ort::FLOAT};
    static constexpr size_t REQUIRED = 2, OUTPUTS = 1;

    bool by_column;

    explicit DenseProduct(const Attributes& attributes)
        : by_column(attributes.number("by_column", 0) != 0) {}

    ort::Status* compute(const Call& call) const {
        const Tensor x = call.input(0), w = call.input(1), bias = call.input(2);
        if (w.shape.rank != 2) return refuse("DenseProduct: weights are no matrix");
        const Dense weights = {w.floats(), int(w.shape.size[by_column ? 1 : 0]),
                               int(w.shape.size[by_column ? 0 : 1]), by_column};
        if (x.shape.last() != weights.inputs || (bias && bias.shape.count() != weights.columns)) {
            return refuse("DenseProduct: the sizes of inputs, weights and bias do not fit");
        }
        const size_t rows = size_t(x.shape.rows());
        Shape shape = x.shape;
        shape.size[shape.rank - 1] = weights.columns;
        float* y = call.output(0, shape);
        if (rows == 0) return nullptr;
        constexpr size_t UNIT = 64;  // columns
        const size_t units = (size_t(weights.columns) + UNIT - 1) / UNIT;
        split(call, units, BYTES_OF_PART / (UNIT * 4 * weights.inputs), [&](size_t from, size_t to) {
            const size_t first = from * UNIT;
            size_t last = to * UNIT;
            if (last > size_t(weights.columns)) last = size_t(weights.columns);
            kernels().dense(weights, int(rows), x.floats(), int(first), int(last), y);
            for (size_t m = 0; bias && m < rows; m++) {
                for (size_t c = first; c < last; c++) y[m * weights.columns + c] += bias.floats()[c];
            }
        });
        return nullptr;
    }
};

struct Gate {
    static constexpr const char* NAME = "Gate";
    static constexpr int INPUTS[] = {ort::FLOAT, ort::FLOAT};
    static constexpr size_t REQUIRED = 2, OUTPUTS = 1;

    int activation;

    explicit Gate(const Attributes& attributes)
        : activation(int(attributes.number("activation", SILU))) {}

    ort::Status* compute(const Call& call) const {
        const Tensor gates = call.input(0), ups = call.input(1);
        const size_t count = size_t(gates.shape.count());
        if (size_t(ups.shape.count()) != count) return refuse("Gate: the sizes differ");
        float* y = call.output(0, gates.shape);
        split(call, (count + 511) / 512, 16, [&](size_t from, size_t to) {
            for (size_t i = from * 512; i < to * 512 && i < count; i += GROUP) {
                if (count - i >= GROUP) {
                    kernels().gate(activation, gates.floats() + i, ups.floats() + i, GROUP, y + i);
                    continue;
                }
                float rest[2][GROUP] = {};
                for (size_t c = i; c < count; c++) {
                    rest[0][c - i] = gates.floats()[c];
                    rest[1][c - i] = ups.floats()[c];
                }
                kernels().gate(activation, rest[0], rest[1], GROUP, rest[0]);
                for (size_t c = i; c < count; c++) y[c] = rest[0][c - i];
            }
        });
        return nullptr;
    }
};

struct AddNorm {
    static constexpr const char* NAME = "AddNorm";
    static constexpr int INPUTS[] = {ort::FLOAT, ort::FLOAT, ort::FLOAT};
    static constexpr size_t REQUIRED = 1, OUTPUTS = 2;

    float epsilon;

    explicit AddNorm(const Attributes& attributes) : epsilon(attributes.real("epsilon", 1e-6f)) {}

    ort::Status* compute(const Call& call) const {
        const Tensor x = call.input(0), r = call.input(1), scale = call.input(2);
        const size_t rows = size_t(x.shape.rows()), size = size_t(x.shape.last());
        if ((r && r.shape.count() != x.shape.count()) || !scale ||
            size_t(scale.shape.count()) != size) {
            return refuse("AddNorm: the sizes of the inputs do not fit");
        }
        float *normed = call.output(0, x.shape), *sum = call.output(1, x.shape);
        split(call, rows, 16384 / (size + 1) + 1, [&](size_t from, size_t to) {
            part_scratch.begin(Scratch::bytes<float>(size));
            float* unread = part_scratch.take<float>(size);
            for (size_t m = from; m < to; m++) {
                kernels().add_norm(x.floats() + m * size, r ? r.floats() + m * size : nullptr,
                                   scale.floats(), int(size), epsilon,
                                   sum ? sum + m * size : unread, normed + m * size);
            }
        });
        return nullptr;
    }
};

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

struct Embedding {
    float factor;  // of the embeddings of tokens

    explicit Embedding(const Attributes& attributes) : factor(attributes.real("factor", 1.f)) {}

    // token(id, y) writes the embedding of a token.
    template <class Token>
    ort::Status* embed(const Call& call, int64_t vocabulary, int64_t size, const Token& token) const {
        const Tensor ids = call.input(0), lookahead = call.input(2);
        if (lookahead.shape.rank != 2 || lookahead.shape.last() != size) {
            return refuse("Embed: the tables have rows of other sizes");
        }
        Shape shape = ids.shape;
        if (shape.rank >= 8) return refuse("Embed: the ids have too many dimensions");
        shape.size[shape.rank++] = size;
        float* y = call.output(0, shape);
        for (int64_t i = 0; i < ids.shape.count(); i++, y += size) {
            const int64_t id = ids.ints()[i];
            if (id < 0 || id >= vocabulary + lookahead.shape.size[0]) {
                return refuse("Embed: an id is out of range");
            }
            const int64_t row = id - vocabulary;
            if (row >= 0) {
                __builtin_memcpy(y, lookahead.floats() + row * size, sizeof(float) * size_t(size));
                continue;
            }
            token(id, y);
            for (int64_t k = 0; factor != 1.f && k < size; k++) y[k] *= factor;
        }
        return nullptr;
    }
};

struct Embed : Embedding {
    static constexpr const char* NAME = "Embed";
    static constexpr int INPUTS[] = {ort::INT64, ort::FLOAT, ort::FLOAT};
    static constexpr size_t REQUIRED = 3, OUTPUTS = 1;

    using Embedding::Embedding;

    ort::Status* compute(const Call& call) const {
        const Tensor table = call.input(1);
        const int64_t size = table.shape.last();
        return embed(call, table.shape.rows(), size, [&](int64_t id, float* y) {
            __builtin_memcpy(y, table.floats() + id * size, sizeof(float) * size_t(size));
        });
    }
};

struct EmbedPacked : Embedding {
    static constexpr const char* NAME = "EmbedPacked";
    static constexpr int INPUTS[] = {ort::INT64, ort::UINT8, ort::FLOAT};
    static constexpr size_t REQUIRED = 3, OUTPUTS = 1;

    Packed table;

    explicit EmbedPacked(const Attributes& attributes)
        : Embedding(attributes),
          table{nullptr, int(attributes.number("K", 0)), int(attributes.number("N", 0)),
                int(attributes.number("bits", 4))} {}

    ort::Status* compute(const Call& call) const {
        const Tensor packed = call.input(1);
        if (!is_packed(table.bits) || !fits(packed, table)) return refuse("EmbedPacked: the table has another size");
        Packed weights = table;
        weights.data = packed.bytes();
        return embed(call, table.columns, table.inputs, [&](int64_t id, float* y) {
            kernels().unpack_column(weights, id, y);
        });
    }
};

template <class Op>
struct Registered : ort::CustomOp {
    Registered() : ort::CustomOp{} {
        using Self = const ort::CustomOp*;
        version = 16;
        GetName = [](Self) { return Op::NAME; };
        GetExecutionProviderType = [](Self) { return "CPUExecutionProvider"; };
        GetInputType = [](Self, size_t i) { return Op::INPUTS[i]; };
        GetInputTypeCount = [](Self) { return sizeof Op::INPUTS / sizeof Op::INPUTS[0]; };
        GetOutputType = [](Self, size_t) -> int { return ort::FLOAT; };
        GetOutputTypeCount = [](Self) -> size_t { return Op::OUTPUTS; };
        GetInputCharacteristic = [](Self, size_t i) { return i < Op::REQUIRED ? 0 : 1; };
        GetOutputCharacteristic = [](Self, size_t i) { return i == 0 ? 0 : 1; };
        GetInputMemoryType = [](Self, size_t) { return 0; };
        GetVariadicInputMinArity = GetVariadicOutputMinArity = [](Self) { return 0; };
        GetVariadicInputHomogeneity = GetVariadicOutputHomogeneity = [](Self) { return 0; };
        CreateKernel = [](Self, ort::Api, const ort::Info* info) -> void* {
            return new Op(Attributes(info));
        };
        CreateKernelV2 = [](Self, ort::Api, const ort::Info* info, void** kernel) -> ort::Status* {
            *kernel = new Op(Attributes(info));
            return nullptr;
        };
        KernelCompute = [](void*, ort::Context*) {};
        KernelComputeV2 = [](void* kernel, ort::Context* context) {
            return static_cast<const Op*>(kernel)->compute(Call(context));
        };
        KernelDestroy = [](void* kernel) { delete static_cast<Op*>(kernel); };
    }
};

template <class... Ops>
ort::Status* add(ort::Domain* domain) {
    ort::Status* status = nullptr;
    const auto add_one = [&](const ort::CustomOp& op) {
        if (status == nullptr) {
            status = entry<ort::Status*(ort::Domain*, const ort::CustomOp*)>(ort::CustomOpDomain_Add)(
                domain, &op);
        }
    };
    static const struct : Registered<Ops>... {
    } ops;
    (add_one(static_cast<const Registered<Ops>&>(ops)), ...);
    return status;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
    static ort::Domain* domain = nullptr;
    static ort::Status* failed = [&]() -> ort::Status* {
        api = base->GetApi(ort::API_VERSION);
        if (api == nullptr) return nullptr;
        ort::Status* status = entry<ort::Status*(const char*, ort::Domain**)>(
            ort::CreateCustomOpDomain)("pass.cpu", &domain);
        return status != nullptr
                   ? status
                   : add<Product, DenseProduct, Gate, AddNorm, WindowAttention, Embed, EmbedPacked>(
                         domain);
    }();
    if (failed != nullptr || api == nullptr) return failed;
    return entry<ort::Status*(ort::SessionOptions*, ort::Domain*)>(ort::AddCustomOpDomain)(options,
                                                                                          domain);
}

EXPORT const char* pass_kernels_name() { return kernels().name; }
