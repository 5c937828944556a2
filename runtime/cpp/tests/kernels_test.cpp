// The kernels of a CPU: how they are described, and what depends on them.
#include "backends/ort/kernels.h"

#include "backends/buffers.h"
#include "bundle/bindings.h"
#include "catch.hpp"
#include "errors.h"

using namespace pass;

TEST_CASE("kernels are described as in Python", "[kernels]") {
    CHECK(Kernels().text() ==
          "8-bit sums exact, numbers of rows equal from 1 on, softmax with masked entries equal");
    CHECK(Kernels{false, std::nullopt, false}.text() ==
          "8-bit sums saturating, numbers of rows never equal, softmax with masked entries not "
          "equal");
}

TEST_CASE("block_formats lists the block formats of a bundle's weights", "[kernels]") {
    using Formats = std::set<BlockFormat>;
    ModelInfo model;
    model.weights = "full";
    CHECK(block_formats(model).empty());
    model.weights = "int4";  // of a bundle without `quantization`
    CHECK(block_formats(model) == Formats{{4, 32}, {8, 32}});
    model.quantization = QuantizationInfo{{"int8", std::nullopt, false},
                                          SchemeInfo{"int8", 64, true},
                                          {{"a", {"int4", 16, false}}, {"b", {"fp8", 32, false}}}};
    CHECK(block_formats(model) == Formats{{4, 16}, {4, 64}, {8, 64}});
}

TEST_CASE("find_kernels finds the same kernels again", "[kernels]") {
    const auto library = OrtLibrary::open({});
    Manifest manifest;
    manifest.model.weights = "int4";
    const Kernels of_int4 = find_kernels(*library, manifest);
    CHECK(find_kernels(*library, manifest).text() == of_int4.text());
    manifest.model.weights = "full";  // products do not depend on the number of rows
    const Kernels of_full = find_kernels(*library, manifest);
    CHECK(of_full.least_rows == 1);
    CHECK(of_full.exact_sums == of_int4.exact_sums);
}

TEST_CASE("8-bit weights are made unsigned where sums saturate", "[kernels]") {
    Manifest manifest;
    manifest.model.weights = "w8a8";
    manifest.derived = {{"trunk.cpu.onnx", "cpu", std::nullopt, true, true},
                        {"trunk.cuda.onnx", "cuda", {}, true, false}};
    const Kernels saturating{false, 1, true};
    CHECK(needs_unsigned_weights(saturating, "bundle", manifest));
    CHECK_FALSE(needs_unsigned_weights({}, "bundle", manifest));
    manifest.derived[0].weight_zero_points = false;
    CHECK_FALSE(needs_unsigned_weights({}, "bundle", manifest));
    CHECK_THROWS_WITH(
        needs_unsigned_weights(saturating, "bundle", manifest),
        "bundle: its 8-bit sums saturate on this CPU: export it again, or export it as int8");
    manifest.model.weights = "int8";
    CHECK_FALSE(needs_unsigned_weights(saturating, "bundle", manifest));
    manifest.model.quantization =
        QuantizationInfo{{"int8", std::nullopt, false}, {}, {}, "static_int8"};
    CHECK_THROWS_AS(needs_unsigned_weights(saturating, "bundle", manifest), Error);
}

TEST_CASE("a pass of fewer than least_rows rows is padded after the slots' rows", "[bindings]") {
    Manifest manifest;
    manifest.model.vocab_size = 8;
    manifest.trunk.inputs = {{"input_ids", "int64", {"batch", "width"}},
                             {"logit_rows", "int64", {"logit_rows"}}};
    manifest.trunk.outputs = {{"logits", "float32", {"batch", "logit_rows", std::int64_t{8}}}};
    const BundleBindings bindings(manifest, 64, 1, 2);  // least_width 1, least_rows 2
    // The shapes of the ids and of the logits: of the tensor, and of a slot's row.
    const auto shapes = [&](const Plan& plan, int batch, bool prefill) {
        const Bindings result = bindings.trunk(plan, batch, prefill);
        const Binding &ids = result.inputs.at(0), &logits = result.outputs.at(0);
        return std::vector<Shape>{ids.shape, ids.row, logits.shape, logits.row};
    };
    CHECK(shapes(ar_plan(), 1, false) == std::vector<Shape>{{1, 2}, {1}, {1, 2, 8}, {1, 8}});
    CHECK(shapes(ar_plan(), 2, false) == std::vector<Shape>{{2, 1}, {1}, {2, 1, 8}, {1, 8}});
    CHECK(shapes(verify_plan(2), 1, false) == std::vector<Shape>{{1, 3}, {3}, {1, 3, 8}, {3, 8}});
    CHECK(shapes(prefill_plan(1), 1, true).at(0) == Shape{1, 2});
    CHECK(shapes(prefill_plan(1), 1, true).at(2) == Shape{1, 1, 8});
    const Binding rows = bindings.trunk(ar_plan(), 1).inputs.at(1);
    REQUIRE(rows.constant != nullptr);
    CHECK(*rows.constant == Bytes{0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0});
    CHECK(bindings.trunk_width(prefill_plan(1), 1) == 2);
    CHECK(bindings.padded_width(prefill_plan(1)) == 1);
}
