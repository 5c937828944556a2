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
#include "attention.h"
#include "call.h"
#include "products.h"

namespace {

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
                int(attributes.number("bits", 4)), attributes.number("symmetric", 0) != 0} {}

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
        if (status == nullptr) status = status_of(ort::CustomOpDomain_Add, domain, &op);
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
        ort::Status* status = status_of(ort::CreateCustomOpDomain, "pass.cpu", &domain);
        return status != nullptr
                   ? status
                   : add<Product, DenseProduct, Gate, AddNorm, WindowAttention, Embed, EmbedPacked>(
                         domain);
    }();
    if (failed != nullptr || api == nullptr) return failed;
    return status_of(ort::AddCustomOpDomain, options, domain);
}

EXPORT const char* pass_kernels_name() { return kernels().name; }
