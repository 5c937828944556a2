#include "text/automaton.h"

#include <algorithm>
#include <utility>

namespace pass {

Automaton::Automaton(const std::vector<std::string>& words) {
    for (const std::string& word : words) {
        std::uint32_t state = 0;
        for (const char byte : word) {
            const auto [place, added] = next_.try_emplace(edge(state, byte), static_cast<std::uint32_t>(nodes_.size()));
            if (added) nodes_.push_back({nodes_[state].depth + 1});
            state = place->second;
        }
        nodes_[state].found = word.size();
    }
    std::vector<std::pair<std::uint64_t, std::uint32_t>> edges(next_.begin(), next_.end());
    std::sort(edges.begin(), edges.end(),
              [&](const auto& a, const auto& b) { return nodes_[a.second].depth < nodes_[b.second].depth; });
    for (const auto& [edge, state] : edges) {
        const auto before = static_cast<std::uint32_t>(edge >> 8);
        Node& node = nodes_[state];
        if (before != 0) node.shorter = step(nodes_[before].shorter, static_cast<char>(edge & 0xFF));
        if (node.found == 0) node.found = nodes_[node.shorter].found;
    }
}

std::uint32_t Automaton::step(std::uint32_t state, char byte) const {
    while (true) {
        if (const auto following = next_.find(edge(state, byte)); following != next_.end()) return following->second;
        if (state == 0) return 0;
        state = nodes_[state].shorter;
    }
}

}  // namespace pass
