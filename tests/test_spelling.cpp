// What a mistyped word may mean.
#include <algorithm>

#include "pgpt/base/spelling.h"
#include "pgpt/config/option_table.h"
#include "support/catch.h"

using namespace pgpt;
using Words = std::vector<std::string>;

TEST_CASE("edits are counted, and two neighbours that changed places are one", "[cpu][config]") {
  CHECK(edit_distance("", "") == 0);
  CHECK(edit_distance("", "abc") == 3);
  CHECK(edit_distance("abc", "abc") == 0);
  CHECK(edit_distance("abc", "ac") == 1);
  CHECK(edit_distance("ac", "abc") == 1);
  CHECK(edit_distance("abc", "axc") == 1);
  CHECK(edit_distance("abc", "acb") == 1);
  CHECK(edit_distance("abcd", "badc") == 2);
  CHECK(edit_distance("ca", "abc") == 3);  // the swapped letters are not changed again
  CHECK(edit_distance("kitten", "sitting") == 3);
}

TEST_CASE("the nearest known words are named, and none when all are far", "[cpu][config]") {
  const Words known = {"--num-layers", "--lr", "--micro-batch-size", "--global-batch-size", "--seed", "--seed-low"};
  CHECK(nearest_words("--num-layer", known) == Words{"--num-layers"});
  CHECK(nearest_words("--mirco-bacth-size", known) == Words{"--micro-batch-size"});
  CHECK(nearest_words("--NUM_LAYERS", known) == Words{"--num-layers"});
  CHECK(nearest_words("-lr", known) == Words{"--lr"});
  CHECK(nearest_words("--rl", known) == Words{"--lr"});
  CHECK(nearest_words("--xy", known).empty());  // two edits, but no letter of it is left
  CHECK(nearest_words("--learning-rate", known).empty());
  CHECK(nearest_words("", known).empty());
  CHECK(nearest_words("--", known).empty());
  CHECK(nearest_words("--micro", known) == Words{"--micro-batch-size"});  // what argparse would have completed
  CHECK(nearest_words("b", {"bd", "bc", "a", "be", "bf"}) == Words{"bd", "bc", "be"});
  CHECK(did_you_mean("--see", known) == "; did you mean --seed?");
  CHECK(did_you_mean("cat", {"bat", "hat"}) == "; did you mean bat or hat?");
  CHECK(did_you_mean("cat", {"bat", "hat", "cut"}) == "; did you mean bat, hat or cut?");
  CHECK(did_you_mean("cat", {"elephant"}).empty());
}

TEST_CASE("one or two slips in the name of any option lead to a name that is as near", "[cpu][config]") {
  const Words names = config::listed_names();
  REQUIRE(names.size() > 400);
  std::size_t step = 0;
  for (std::size_t i = 0; i < names.size(); i += 11) {
    const std::string& name = names[i];
    Words typos;
    const std::size_t place = 2 + step++ * 5 % (name.size() - 3);
    typos.push_back(std::string(name).erase(place, 1));
    typos.push_back(std::string(name).insert(place, "x"));
    typos.push_back(name);
    std::swap(typos.back()[place], typos.back()[place + 1]);
    typos.push_back(typos[1] + "s");
    for (const std::string& typo : typos) {
      INFO(name << " as " << typo);
      const Words found = nearest_words(typo, names);
      REQUIRE_FALSE(found.empty());
      CHECK(edit_distance(typo, found.front()) <= edit_distance(typo, name));
    }
  }
}
