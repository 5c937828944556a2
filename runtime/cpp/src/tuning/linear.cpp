#include "tuning/linear.h"

#include <cmath>
#include <utility>

namespace pass {

std::vector<double> solve(Matrix rows) {
    const std::size_t size = rows.size();
    for (std::size_t at = 0; at < size; ++at) {
        std::size_t pivot = at;
        for (std::size_t i = at + 1; i < size; ++i) {
            if (std::abs(rows[i][at]) > std::abs(rows[pivot][at])) pivot = i;
        }
        std::swap(rows[at], rows[pivot]);
        for (std::size_t i = at + 1; i < size; ++i) {
            const double factor = rows[i][at] / rows[at][at];
            for (std::size_t j = at; j <= size; ++j) rows[i][j] -= factor * rows[at][j];
        }
    }
    std::vector<double> x(size);
    for (std::size_t i = size; i-- > 0;) {
        double sum = rows[i][size];
        for (std::size_t j = i + 1; j < size; ++j) sum -= rows[i][j] * x[j];
        x[i] = sum / rows[i][i];
    }
    return x;
}

}  // namespace pass
