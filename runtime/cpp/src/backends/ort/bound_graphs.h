// A cache of bound graphs, by key; the least recently used one is dropped.
#pragma once

#include <cstdint>
#include <map>

#include "backends/ort/bound_graph.h"

namespace pass {

// ONNX Runtime keeps every CUDA graph that it captured. A graph that is bound again to the same addresses therefore
// gets the number that it had, so that its captured graph is used again.
template <class Key>
class BoundGraphs {
   public:
    // The bound graph of `key`; `make` makes it, from the number of its CUDA graph, where it is not cached.
    template <class Make>
    BoundGraph& get(const Key& key, const Make& make) {
        auto found = bound_.find(key);
        if (found == bound_.end()) {
            const auto graph = graph_of_.emplace(key, 0).first;
            if (graph->second == 0) graph->second = next_cuda_graph();
            found = bound_.emplace(key, Kept{make(graph->second), 0}).first;
            if (bound_.size() > most) bound_.erase(oldest(found));
        }
        found->second.used = ++uses_;
        return found->second.bound;
    }

    // To be called when addresses change.
    void clear() {
        bound_.clear();
        graph_of_.clear();
    }

   private:
    struct Kept {
        BoundGraph bound;
        std::uint64_t used;
    };
    using Map = std::map<Key, Kept>;

    typename Map::iterator oldest(typename Map::iterator spared) {
        auto found = bound_.end();
        for (auto one = bound_.begin(); one != bound_.end(); ++one) {
            if (one != spared && (found == bound_.end() || one->second.used < found->second.used)) found = one;
        }
        return found;
    }

    static constexpr std::size_t most = 256;

    Map bound_;
    std::map<Key, int> graph_of_;
    std::uint64_t uses_ = 0;
};

}  // namespace pass
