// The operators Product, DenseProduct and Gate.
#pragma once
#include "call.h"

namespace {

// Rows that were rounded to 8 bits for weights, in tiles of up to kernels().tile_rows rows of about
// equal number.
class RoundedRows {
   public:
    RoundedRows(size_t rows, const Packed& weights)
        : rows_(rows),
          inputs_(weights.inputs),
          middle_(weights.symmetric ? weights.middle() : 0),
          blocks_(weights.blocks()),
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
                          kernels().round_row(row(begin + m), inputs_, middle_,
                                              blocks + begin * blocks_ + m, int(count));
                      }
                  }
              });
    }

    // y [rows,16] = the rows times a group of the weights.
    void multiply(const Packed& weights, int group, float* y) const {
        for (size_t t = 0; t < tiles_; t++) {
            const size_t begin = first(t);
            kernels().product_tile(weights, group, int(first(t + 1) - begin),
                                   blocks_of_rows_ + begin * blocks_, y + begin * GROUP);
        }
    }

   private:
    size_t rows_;
    int inputs_, middle_;
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
        weights = {nullptr, number("K", 0), groups * GROUP, number("bits", 4),
                   number("symmetric", 0) != 0};
        rank = number("rank", 0);
        part1 = number("part1", groups);
        part2 = number("part2", groups);
        const int parts = activation ? 2 : part2 < groups ? 3 : part1 < groups ? 2 : 1;
        down = {nullptr, weights.inputs, rank * parts, 8, true};
        up = {nullptr, rank, groups * GROUP, 8, true};
    }

    int parts() const { return rank ? down.columns / rank : 0; }
    int part(int group) const {
        return activation ? group % 2 : group >= part2 ? 2 : group >= part1 ? 1 : 0;
    }

    ort::Status* compute(const Call& call) const {
        const Tensor x = call.input(0), packed = call.input(1), bias = call.input(2);
        const Tensor adapted = call.input(3), a = call.input(4), b = call.input(5);
        if (weights.inputs < 1 || columns < 1 || !is_packed(weights.bits)) {
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
        RoundedRows main(rows, weights), low(chosen, down), high(chosen, up);
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

}  // namespace
