// Windows and plans, as in pass_runtime/bundle/window.py and plan.py.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pass {

inline constexpr int max_lookahead = 16;

// The layout of one pass: the root, a chain of `drafts` draft rows, and groups[a] look-ahead rows
// after row a.
struct Window {
    std::string name;
    int drafts = 0;
    std::vector<int> groups;

    int lookahead_rows() const;
    int width() const { return 1 + drafts + lookahead_rows(); }
    int max_emitted() const { return drafts + 1; }
    bool is_fused() const { return drafts > 0 && !groups.empty(); }
    // How many drafts the next window holds if this pass accepts `accepted`.
    int next_drafts(int accepted) const {
        return groups.empty() ? 0 : groups[static_cast<std::size_t>(accepted)];
    }
    // The window that the tail of this window lays out.
    Window next() const;
    // The name of the window whose tail graphs run: that with full groups.
    std::string tail() const { return is_fused() ? "fused-" + std::to_string(drafts) : name; }

    bool operator==(const Window& other) const { return name == other.name; }
};

Window ar_window();
Window draft_window(int lookahead);
Window verify_window(int lookahead);
// Verifies copied drafts, and lays out `ar`.
Window copy_window(int drafts);
// A prompt chunk: a root and a chain of drafts.
Window prefill_window(int width);
// Throws Error if no window has these group sizes.
Window fused_window(const std::vector<int>& groups);

// Inputs that are the same in every pass. A window has Q rows: D drafts, A look-ahead rows, the
// root.
struct WindowConstants {
    std::vector<std::int64_t> row_position;    // [Q] relative to the root's position
    std::vector<std::uint8_t> window_mask;     // [Q,Q] 1 at (i, j) if row i sees row j
    std::vector<std::int64_t> logit_rows;      // [Q] all rows
    std::vector<std::int64_t> lookahead_rows;  // [A]
    std::vector<std::int64_t> draft_rows;      // [D+1,D] row j of group a, else 0; if fused
    std::vector<std::int64_t> lookahead_ids;   // [A] vocab_size + i for look-ahead embedding i
};

WindowConstants constants_of(const Window& window, std::int64_t vocab_size);

// What `--plan` names: the windows that the passes of a sequence use in turn.
struct Plan {
    std::string name;
    std::vector<Window> windows;

    // The most drafts that one pass can accept.
    int drafts() const;
    bool contains(const Window& window) const;
    // How many cache entries the passes from `first` to the last window need if no draft is
    // accepted.
    int reach(const Window& first) const;
    // The plan with one draft less, or `ar`.
    Plan narrower() const;

    bool operator==(const Plan& other) const {
        return name == other.name && windows == other.windows;
    }
};

// "ar", "two-pass", "fused" with `lookahead` drafts (0 gives `ar`), or "fused:" and the size of
// every group. Throws Error for other names.
Plan make_plan(const std::string& name, int lookahead);
Plan fused_plan(const std::vector<int>& groups);

}  // namespace pass
