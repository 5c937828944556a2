// The kernels. The file of an instruction set defines LANES, a vector F and its operations, Codes,
// Sums, TILE_ROWS, SCORE_ROWS, VALUE_ROWS, DENSE_ROWS and transpose_keys, and includes this. No
// template of the standard library is used: the linker would merge it with other instruction sets'.

template <int N>
struct Rows {
    static constexpr int count = N;
};

// Calls function(Rows<n>()) for an n from 1 to MOST.
template <int MOST, int N = 1, class Function>
inline void with_rows(int n, const Function& function) {
    if constexpr (N < MOST) {
        if (n != N) return with_rows<MOST, N + 1>(n, function);
    }
    function(Rows<N>());
}

constexpr int PARTS = GROUP / LANES;
constexpr int AHEAD = 5120;  // bytes to prefetch ahead: less, or more, is slower on one row

inline int least(int a, int b) { return a < b ? a : b; }

// Adds 16 numbers in a fixed order.
inline float sum_lanes(float* lanes) {
    for (int width = GROUP / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

inline F exponential(F x) {  // relative error below 2e-7; Cephes' polynomial
    const F magic = set(12582912.f);  // 1.5 * 2^23: adding it rounds to whole numbers
    x = max(min(x, set(88.f)), set(-87.f));
    F shifted = fma(x, set(1.44269504f), magic), n = shifted - magic;
    F r = fma(n, set(2.12194440e-4f), fma(n, set(-0.693359375f), x));
    F y = set(1.9875691500e-4f);
    y = fma(y, r, set(1.3981999507e-3f));
    y = fma(y, r, set(8.3334519073e-3f));
    y = fma(y, r, set(4.1665795894e-2f));
    y = fma(y, r, set(1.6666665459e-1f));
    y = fma(y, r, set(5.0000001201e-1f));
    y = fma(y * r, r, r + set(1.f));
    return y * power_of_two(shifted);
}

inline float exponential(float x) {
    float lanes[LANES];
    store(lanes, exponential(set(x)));
    return lanes[0];
}

// ---- products -------------------------------------------------------------------------------------

void round_row(const float* x, int inputs, int middle, RowBlock* out, int step) {
    for (int start = 0; start < inputs; start += BLOCK, out += step) {
        float padded[BLOCK];
        const float* block = x + start;
        if (inputs - start < BLOCK) {
            for (int i = 0; i < BLOCK; i++) padded[i] = start + i < inputs ? block[i] : 0.f;
            block = padded;
        }
        // Of the bits without sign, those of infinity and NaN are the largest.
        uint32_t largest = 0;
        for (int i = 0; i < BLOCK; i++) {
            uint32_t bits;
            __builtin_memcpy(&bits, block + i, 4);
            bits &= 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
        float magnitude, factor = 0.f, scale = 0.f;
        __builtin_memcpy(&magnitude, &largest, 4);
        if (largest >= 0x7f800000u) {
            scale = __builtin_nanf("");
        } else if (magnitude > 1e-30f) {
            scale = magnitude / 127.f;
            factor = 127.f / magnitude;
        }
        int sum = 0;
        if (factor != 0.f) {
            for (int i = 0; i < BLOCK; i++) {
                float shifted = block[i] * factor + 12582912.f;  // rounds to whole numbers
                int32_t bits;
                __builtin_memcpy(&bits, &shifted, 4);
                int q = bits - 0x4b400000;
                out->q[i] = int8_t(q);
                sum += q;
            }
        } else {
            __builtin_memset(out->q, 0, BLOCK);
        }
        out->scale = scale;
        out->sum = scale * float(sum);
        out->shift = -middle * sum;
    }
}

// One or two rows wait for memory, and take all parts of a block in turn; more rows compute, and take
// one part of all blocks at a time, while they fetch the group that follows.
template <int M, int BITS>
void tile(const Packed& w, int group, const RowBlock* rows, float* y) {
    constexpr int codes = Packed::code_bytes(BITS);
    constexpr int AT_ONCE = M <= 2 ? PARTS : 1, PASSES = PARTS / AT_ONCE;
    const int blocks = w.blocks(), bytes = w.block_bytes();
    const uint8_t* next = w.group(group) + (PASSES == 1 ? AHEAD : w.group_bytes());
    for (int first = 0; first < PARTS; first += AT_ONCE) {
        F total[AT_ONCE][M];
        for (int p = 0; p < AT_ONCE; p++) {
            for (int m = 0; m < M; m++) total[p][m] = set(0.f);
        }
        const uint8_t* stream = w.group(group);
        const RowBlock* a = rows;
        for (int b = 0; b < blocks; b++, stream += bytes, next += bytes / PASSES, a += M) {
            for (int i = 0; i < (codes + 64) / PASSES; i += 64) __builtin_prefetch(next + i);
            for (int p = 0; p < AT_ONCE; p++) {
                const int part = first + p;
                Sums<BITS> sums[M];
                for (int m = 0; m < M; m++) sums[m].clear();
                for (int v = 0; v < 4; v++) {
                    const Codes<BITS> eight(stream, v, part);
                    for (int m = 0; m < M; m++) sums[m].add(eight, a[m].q + 8 * v);
                }
                const F scale = halves(stream + codes + 2 * LANES * part);
                F* sum = total[p];
                if (w.symmetric) {
                    for (int m = 0; m < M; m++) {
                        sum[m] = fma(sums[m].total(a[m].shift), scale * set(a[m].scale), sum[m]);
                    }
                    continue;
                }
                const F offset = halves(stream + codes + 32 + 2 * LANES * part);
                for (int m = 0; m < M; m++) {
                    sum[m] = fma(sums[m].total(0), scale * set(a[m].scale), sum[m]);
                    sum[m] = fma(offset, set(a[m].sum), sum[m]);
                }
            }
        }
        for (int p = 0; p < AT_ONCE; p++) {
            for (int m = 0; m < M; m++) store(y + m * GROUP + (first + p) * LANES, total[p][m]);
        }
    }
}

void product_tile(const Packed& w, int group, int rows, const RowBlock* a, float* y) {
    with_rows<TILE_ROWS>(rows, [&](auto n) {
        if (w.bits == 4) tile<n.count, 4>(w, group, a, y);
        else if (w.bits == 5) tile<n.count, 5>(w, group, a, y);
        else tile<n.count, 8>(w, group, a, y);
    });
}

// Weights [inputs,columns]: 4 vectors of columns for some rows.
template <int M>
void dense_tile(const Dense& w, const float* x, int column, float* y) {
    F total[M][4];
    for (int m = 0; m < M; m++) {
        for (int i = 0; i < 4; i++) total[m][i] = set(0.f);
    }
    const float* line = w.data + column;
    for (int k = 0; k < w.inputs; k++, line += w.columns) {
        for (int i = 0; i < 4; i++) __builtin_prefetch(line + 8 * size_t(w.columns) + i * LANES);
        F part[4];
        for (int i = 0; i < 4; i++) part[i] = load(line + i * LANES);
        for (int m = 0; m < M; m++) {
            const F a = set(x[m * size_t(w.inputs) + k]);
            for (int i = 0; i < 4; i++) total[m][i] = fma(a, part[i], total[m][i]);
        }
    }
    for (int m = 0; m < M; m++) {
        for (int i = 0; i < 4; i++) store(y + m * size_t(w.columns) + column + i * LANES, total[m][i]);
    }
}

// Weights [columns,inputs]: one column for some rows.
template <int M>
void dense_column(const Dense& w, const float* x, int column, float* y) {
    F total[M][PARTS];
    for (int m = 0; m < M; m++) {
        for (int p = 0; p < PARTS; p++) total[m][p] = set(0.f);
    }
    const float* line = w.data + size_t(column) * w.inputs;
    const int whole = w.inputs / GROUP * GROUP;
    for (int k = 0; k < whole; k += GROUP) {
        for (int p = 0; p < PARTS; p++) {
            const F part = load(line + k + p * LANES);
            for (int m = 0; m < M; m++) {
                total[m][p] = fma(load(x + m * size_t(w.inputs) + k + p * LANES), part, total[m][p]);
            }
        }
    }
    for (int m = 0; m < M; m++) {
        float lanes[GROUP];
        for (int p = 0; p < PARTS; p++) store(lanes + p * LANES, total[m][p]);
        for (int k = whole; k < w.inputs; k++) {
            lanes[k - whole] = __builtin_fmaf(x[m * size_t(w.inputs) + k], line[k], lanes[k - whole]);
        }
        y[m * size_t(w.columns) + column] = sum_lanes(lanes);
    }
}

void dense(const Dense& w, int rows, const float* x, int first, int last, float* y) {
    for (int column = first; column < last;) {
        const int step = w.by_column ? 1 : least(4 * LANES, last - column);
        for (int m = 0; m < rows;) {
            const float* a = x + m * size_t(w.inputs);
            float* out = y + m * size_t(w.columns);
            int count = least(rows - m, DENSE_ROWS);
            if (w.by_column || step == 4 * LANES) {
                with_rows<DENSE_ROWS>(count, [&](auto n) {
                    if (w.by_column) dense_column<n.count>(w, a, column, out);
                    else dense_tile<n.count>(w, a, column, out);
                });
            } else {
                count = 1;
                for (int c = column; c < last; c++) {
                    float total = 0.f;
                    for (int k = 0; k < w.inputs; k++) {
                        total = __builtin_fmaf(a[k], w.data[size_t(k) * w.columns + c], total);
                    }
                    out[c] = total;
                }
            }
            m += count;
        }
        column += step;
    }
}

void unpack_column(const Packed& w, int64_t column, float* y) {
    const uint8_t* stream = w.group(int(column / GROUP));
    const int c = int(column % GROUP), codes = Packed::code_bytes(w.bits);
    for (int b = 0; b < w.blocks(); b++, stream += w.block_bytes()) {
        float scales[GROUP], offsets[GROUP];
        for (int p = 0; p < PARTS; p++) {
            const F scale = halves(stream + codes + 2 * LANES * p);
            store(scales + p * LANES, scale);
            store(offsets + p * LANES, w.symmetric ? scale * set(float(-w.middle()))
                                                   : halves(stream + codes + 32 + 2 * LANES * p));
        }
        for (int i = 0; i < BLOCK && b * BLOCK + i < w.inputs; i++) {
            const int word = i / 4, byte = 4 * c + i % 4;
            int code;
            if (w.bits == 8) {
                code = stream[64 * word + byte];
            } else {
                code = stream[64 * (word / 2) + byte] >> (word % 2 * 4) & 15;
                if (w.bits == 5) code |= (stream[256 + 8 * word + byte / 8] >> (byte % 8) & 1) << 4;
            }
            y[b * BLOCK + i] = float(code) * scales[c] + offsets[c];
        }
    }
}

// ---- norms, rotation, activations -----------------------------------------------------------------

inline float root_mean_square(const float* x, int size, float epsilon) {
    float lanes[GROUP] = {};
    const int whole = size / GROUP * GROUP;
    F sums[PARTS];
    for (int p = 0; p < PARTS; p++) sums[p] = set(0.f);
    for (int i = 0; i < whole; i += GROUP) {
        for (int p = 0; p < PARTS; p++) {
            const F part = load(x + i + p * LANES);
            sums[p] = fma(part, part, sums[p]);
        }
    }
    for (int p = 0; p < PARTS; p++) store(lanes + p * LANES, sums[p]);
    for (int i = whole; i < size; i++) lanes[i - whole] = __builtin_fmaf(x[i], x[i], lanes[i - whole]);
    return __builtin_sqrtf(sum_lanes(lanes) / float(size) + epsilon);
}

void add_norm(const float* x, const float* r, const float* scale, int size, float epsilon, float* y,
              float* normed) {
    for (int i = 0; i < size; i++) y[i] = r ? x[i] + r[i] : x[i];
    const float factor = 1.f / root_mean_square(y, size, epsilon);
    for (int i = 0; i < size; i++) normed[i] = y[i] * factor * scale[i];
}

void rotate(const float* x, const float* cos, const float* sin, int half, int size, float scale,
            float* y) {
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        y[i] = __builtin_fmaf(a, cos[i], -(b * sin[i])) * scale;
        y[i + half] = __builtin_fmaf(a, sin[i], b * cos[i]) * scale;
    }
    for (int i = 2 * half; i < size; i++) y[i] = x[i] * scale;
}

void gate(int activation, const float* gates, const float* ups, int count, float* y) {
    for (int i = 0; i < count; i += LANES) {
        const F x = load(gates + i);
        F exponent = set(0.f) - x;
        if (activation == GELU_TANH) {  // x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
            exponent = set(-1.5957691216057308f) * fma(set(0.044715f), x * x * x, x);
        }
        store(y + i, x / (set(1.f) + exponential(exponent)) * load(ups + i));
    }
}

// ---- attention ------------------------------------------------------------------------------------

// scores [M,16 keys] of queries [M,size], whose results are `stride` apart.
template <int M>
void score_keys(const float* queries, int size, const float* keys, float* y, int stride) {
    F total[M][PARTS];
    for (int m = 0; m < M; m++) {
        for (int p = 0; p < PARTS; p++) total[m][p] = set(0.f);
    }
    for (int d = 0; d < size; d++) {
        for (int p = 0; p < PARTS; p++) {
            const F key = load(keys + d * GROUP + p * LANES);
            for (int m = 0; m < M; m++) total[m][p] = fma(key, set(queries[m * size + d]), total[m][p]);
        }
    }
    for (int m = 0; m < M; m++) {
        for (int p = 0; p < PARTS; p++) store(y + m * stride + p * LANES, total[m][p]);
    }
}

// y [M,size] at columns d .. d + C * LANES: sums of `count` values, weighted.
template <int M, int C>
void add_values(const float* weights, int stride, const float* values, int count, int size, int d,
                float* y) {
    F total[M][C];
    for (int m = 0; m < M; m++) {
        for (int c = 0; c < C; c++) total[m][c] = set(0.f);
    }
    for (int i = 0; i < count; i++) {
        F value[C];
        for (int c = 0; c < C; c++) value[c] = load(values + size_t(i) * size + d + c * LANES);
        for (int m = 0; m < M; m++) {
            const F weight = set(weights[m * stride + i]);
            for (int c = 0; c < C; c++) total[m][c] = fma(weight, value[c], total[m][c]);
        }
    }
    for (int m = 0; m < M; m++) {
        for (int c = 0; c < C; c++) store(y + m * size + d + c * LANES, total[m][c]);
    }
}

template <int M>
void weigh(const float* weights, int stride, const float* values, int count, int size, float* y) {
    int d = 0;
    for (; d + 4 * LANES <= size; d += 4 * LANES) {
        add_values<M, 4>(weights, stride, values, count, size, d, y);
    }
    for (; d + LANES <= size; d += LANES) {
        add_values<M, 1>(weights, stride, values, count, size, d, y);
    }
    for (; d < size; d++) {
        for (int m = 0; m < M; m++) {
            float total = 0.f;
            for (int i = 0; i < count; i++) {
                total = __builtin_fmaf(weights[m * stride + i], values[size_t(i) * size + d], total);
            }
            y[m * size + d] = total;
        }
    }
}

// Sets the scores of entries that a row does not see to UNSEEN. `start` is the first entry.
void mask_scores(const Attention& a, int row, int64_t start, int count, float* scores) {
    const int64_t first = a.window > 0 || a.length < start ? 0 : a.length - start;
    for (int i = int(first); i < count; i++) {
        const int64_t in_window = start + i - a.length;
        bool seen = in_window < 0 || a.window_mask[row * a.rows + in_window];
        if (a.window > 0) {
            const int64_t position = in_window < 0 ? in_window : a.row_position[in_window];
            seen = seen && a.row_position[row] - position < a.window;
        }
        if (!seen) scores[i] = UNSEEN;
    }
}

void attend(const Attention& a, int kv_head, int first, int count, int64_t segment, Partial& out) {
    const int group = a.heads / a.kv_heads, size = a.size;
    const int64_t start = segment * SEGMENT, end = a.length + a.rows;
    const int entries = int(end - start < SEGMENT ? end - start : SEGMENT);
    const size_t base = (size_t(kv_head) * a.capacity + start) * size;
    const float *keys = a.keys + base, *values = a.values + base;
    float* queries = static_cast<float*>(__builtin_alloca(sizeof(float) * QUERIES * size));
    float* transposed = static_cast<float*>(
        __builtin_alloca_with_align(sizeof(float) * GROUP * size, 512));
    float scores[QUERIES * SEGMENT];
    for (int x = 0; x < count; x++) {
        const int row = (first + x) / group, head = kv_head * group + (first + x) % group;
        __builtin_memcpy(queries + x * size, a.queries + (size_t(row) * a.heads + head) * size,
                         sizeof(float) * size);
    }
    for (int i = 0; i < entries; i += GROUP) {
        transpose_keys(keys + size_t(i) * size, least(entries - i, GROUP), size, transposed);
        for (int x = 0; x < count; x += SCORE_ROWS) {
            with_rows<SCORE_ROWS>(least(count - x, SCORE_ROWS), [&](auto n) {
                score_keys<n.count>(queries + x * size, size, transposed, scores + x * SEGMENT + i,
                                    SEGMENT);
            });
        }
    }
    const bool all_seen = start + entries <= a.length && a.window == 0;
    const int padded = (entries + GROUP - 1) / GROUP * GROUP;
    for (int x = 0; x < count; x++) {
        float* row = scores + x * SEGMENT;
        if (!all_seen) mask_scores(a, (first + x) / group, start, entries, row);
        for (int i = entries; i < padded; i++) row[i] = UNSEEN;
        F highest = set(UNSEEN), finite = set(0.f);  // `finite` is 0, or NaN
        for (int i = 0; i < padded; i += LANES) {
            const F score = load(row + i);
            highest = max(score, highest);
            finite = fma(score, set(0.f), finite);
        }
        float lanes[GROUP] = {};
        store(lanes, highest);
        float largest = UNSEEN;
        for (int i = 0; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
        store(lanes, finite);
        for (int i = 1; i < LANES; i++) lanes[0] += lanes[i];
        const bool is_number = lanes[0] == 0.f;
        out.max[x] = is_number ? largest : 0.f;
        if (!is_number || largest == UNSEEN) {
            out.sum[x] = is_number ? 0.f : __builtin_nanf("");
            for (int i = 0; i < padded; i++) row[i] = 0.f;
            continue;
        }
        F sums[PARTS];
        for (int p = 0; p < PARTS; p++) sums[p] = set(0.f);
        for (int i = 0; i < padded; i += GROUP) {
            for (int p = 0; p < PARTS; p++) {
                float* at = row + i + p * LANES;
                const F score = load(at);
                const F weight = zero_where_unseen(exponential(score - set(largest)), score);
                store(at, weight);
                sums[p] = sums[p] + weight;
            }
        }
        for (int p = 0; p < PARTS; p++) store(lanes + p * LANES, sums[p]);
        out.sum[x] = sum_lanes(lanes);
    }
    for (int x = 0; x < count; x += VALUE_ROWS) {
        with_rows<VALUE_ROWS>(least(count - x, VALUE_ROWS), [&](auto n) {
            weigh<n.count>(scores + x * SEGMENT, SEGMENT, values, entries, size,
                           out.weighted + x * size);
        });
    }
}

void join(const Partial* parts, int segments, int count, int size, float* const* y) {
    for (int x = 0; x < count; x++) {
        float largest = UNSEEN, sum = 0.f;
        for (int s = 0; s < segments; s++) {
            largest = parts[s].max[x] > largest ? parts[s].max[x] : largest;
        }
        for (int d = 0; d < size; d++) y[x][d] = 0.f;
        for (int s = 0; s < segments; s++) {
            if (parts[s].max[x] == UNSEEN) continue;
            const float factor = exponential(parts[s].max[x] - largest);
            const float* weighted = parts[s].weighted + x * size;
            sum = __builtin_fmaf(parts[s].sum[x], factor, sum);
            for (int d = 0; d < size; d++) y[x][d] = __builtin_fmaf(weighted[d], factor, y[x][d]);
        }
        const float inverse = sum == 0.f ? 0.f : 1.f / sum;
        for (int d = 0; d < size; d++) y[x][d] *= inverse;
    }
}

constexpr Kernels variant(const char* name) {
    return {name,   TILE_ROWS, round_row, product_tile, dense, add_norm,
            rotate, gate,      attend,    join,         unpack_column};
}
